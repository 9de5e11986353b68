"""Questions 1 and 2: the scale of scores, and what attention costs."""

from __future__ import annotations

import math


def score_deviation_64() -> float:
    """Return the standard deviation of an unscaled score at width 64."""
    return math.sqrt(64)


def score_deviation_512() -> float:
    """Return the standard deviation of an unscaled score at width 512."""
    return math.sqrt(512)


def _problem_value(exercise: str, name: str) -> int:
    """Return a number that an exercise gives."""
    from clearhead.course.exercises import solve

    grid = solve(exercise).step("given").grid
    return int(grid.cells[grid.rows.index(name)][0])


def _result(exercise: str, step: str) -> int:
    """Return the integer of a step."""
    from clearhead.course.exercises import solve

    return int(solve(exercise).step(step).grid.cells[0][0])


def table_kernel() -> int:
    """Return the kernel size of the complexity table."""
    return _problem_value("complexity-table", "k")


def table_length() -> int:
    """Return the length of the complexity table."""
    return _problem_value("complexity-table", "n")


def table_width() -> int:
    """Return the width of the complexity table."""
    return _problem_value("complexity-table", "d")


def table_restriction() -> int:
    """Return the number of keys per query of restricted attention in the complexity table."""
    return _problem_value("complexity-table", "r")


_LENGTH, _WIDTH = 1000, 512


def attention_parameters() -> int:
    """Return the parameters of one attention layer."""
    return _result("attention-1000-512", "parameters_total")


def attention_parameters_without_output() -> int:
    """Return the parameters of the three input projections."""
    return _result("attention-1000-512", "per_head")


def attention_weight_count() -> int:
    """Return the number of weights of one head."""
    return _LENGTH**2


def attention_weight_bytes() -> int:
    """Return the bytes of the weights of one head in float32."""
    return _result("attention-1000-512", "weights_bytes")


def attention_weight_bytes_8() -> int:
    """Return the bytes of the weights of eight heads."""
    return 8 * attention_weight_bytes()


def attention_operations() -> int:
    """Return the operations of a forward pass."""
    return _result("attention-1000-512", "operations_total")


def attention_multiply_adds() -> int:
    """Return the multiply-adds of a forward pass."""
    return attention_operations() // 2


def attention_share() -> str:
    """Return the share of the products that grow as n²."""
    return f"{4 * _LENGTH**2 * _WIDTH / attention_operations():.0%}".replace("%", " %")


def attention_crossing() -> int:
    """Return the length at which projections and products cost the same."""
    return 2 * _WIDTH
