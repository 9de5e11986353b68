"""Functions of Triton kernels that turn products of queries and keys into scores, and scores into weights.

Scores with a bias or a soft cap are in natural units and include the scale; others are products, in base-2 units after
the multiplication by scale · log2(e)."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(1e38)


@triton.jit
def tanh(x, PRECISION: tl.constexpr):
    """Return the hyperbolic tangent; in half precision, to about 1e-7 absolutely, which rounding hides."""
    if PRECISION == "ieee":
        a = tl.abs(x)
        e = tl.math.exp2(a * (2.0 * LOG2E))
        # Near 0, the difference from 1 has few digits. The continued fraction of tanh is exact to 1e-9 up to 0.6.
        a2 = a * a
        is_small = a < 0.6
        numerator = tl.where(is_small, a * (945.0 + a2 * (105.0 + a2)), 2.0)
        denominator = tl.where(is_small, 945.0 + a2 * (420.0 + 15.0 * a2), e + 1.0)
        ratio = numerator / denominator
        t = tl.where(is_small, ratio, 1.0 - ratio)
        return tl.where(x < 0.0, -t, t)
    else:
        return 1.0 - 2.0 / (tl.math.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def load_lines(distance_head, n_entries, HAS_DISTANCE: tl.constexpr):
    """Return the lines that follow a head's bias by distance (see `triton_distance_lines`).

    These are the last entry, value and slope of the first line, the first entry, value and slope of the second one, and
    the entry at which they have these values."""
    if HAS_DISTANCE:
        lines = distance_head + n_entries
        last, value, slope = tl.load(lines).to(tl.int32, bitcast=True), tl.load(lines + 1), tl.load(lines + 2)
        first, value2, slope2 = tl.load(lines + 3).to(tl.int32, bitcast=True), tl.load(lines + 4), tl.load(lines + 5)
        return last, value, slope, first, value2, slope2, tl.load(lines + 6).to(tl.int32, bitcast=True)
    else:
        return 0, 0.0, 0.0, 0, 0.0, 0.0, 0


@triton.jit
def add_distances(
    s, distance_head, rows, columns, row_min, row_max, column_min, column_max,
    last, value, slope, first, value2, slope2, origin, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return scores s (M, N) plus the bias by distance, of which row i and column j have entry rows[i] + columns[j].

    If all entries of the tile are on one line, nothing is loaded, except in float32: there a sum has more roundings
    than a value. The extremes can be any bounds of rows and columns. See `load_lines` for the other arguments."""
    if PRECISION == "ieee":
        return s + tl.load(distance_head + (rows[:, None] + columns[None, :]))
    greatest = row_max + column_max
    is_first = greatest <= last
    if is_first | (row_min + column_min >= first):
        step = tl.where(is_first, slope, slope2)
        corner = tl.where(is_first, value, value2) + step * (greatest - origin).to(tl.float32)
        s = s + (corner + step * (rows - row_max).to(tl.float32))[:, None]
        s = s + (step * (columns - column_max).to(tl.float32))[None, :]
    else:
        s = s + tl.load(distance_head + (rows[:, None] + columns[None, :]))
    return s


@triton.jit
def scale_scores(
    s, distance_head, rows, columns, row_min, row_max, column_min, column_max,
    last, value, slope, first, value2, slope2, origin, scale, cap,
    HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return scores of products s (M, N), capped and with the bias by distance, and the tangents of the cap.

    Without a cap, the tangents are s. The arguments of the bias by distance are those of `add_distances`."""
    t = s
    if HAS_CAP:
        t = tanh(s * (scale / cap), PRECISION)
        s = t * cap
    else:
        s = s * scale
    if HAS_DISTANCE:
        s = add_distances(
            s, distance_head, rows, columns, row_min, row_max, column_min, column_max,
            last, value, slope, first, value2, slope2, origin, PRECISION,
        )  # fmt: skip
    return s, t


@triton.jit
def add_bias(s, bias):
    """Return scores s (M, N) plus a bias, added in float32.

    Some libraries hide keys by the smallest finite number, which is clamped to stay finite in base-2 units; −inf
    is kept."""
    bias = bias.to(tl.float32)
    return s + tl.where(bias == float("-inf"), bias, tl.minimum(tl.maximum(bias, -LARGEST), LARGEST))


@triton.jit
def modify_scores(
    s, bias_row, bias_columns, in_bias, distance_head, rows, columns, row_min, row_max, column_min, column_max,
    last, value, slope, first, value2, slope2, origin, scale, cap,
    HAS_BIAS: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return scores of products s (M, N): scaled, capped and with biases, and the tangents of the cap.

    Without a bias and a cap, both are s. `bias_row` + `bias_columns` are the addresses of the bias, read where
    `in_bias`; the arguments of the bias by distance are those of `add_distances`."""
    t = s
    if HAS_BIAS or HAS_DISTANCE or HAS_CAP:
        s, t = scale_scores(
            s, distance_head, rows, columns, row_min, row_max, column_min, column_max,
            last, value, slope, first, value2, slope2, origin, scale, cap, HAS_DISTANCE, HAS_CAP, PRECISION,
        )  # fmt: skip
    if HAS_BIAS:
        s = add_bias(s, tl.load(bias_row + bias_columns[None, :], mask=in_bias, other=0.0))
    return s, t


@triton.jit
def shift_of(lse, IS_NATURAL: tl.constexpr):
    """Return the log-sum-exp in the units of the scores; +inf for an empty row."""
    return tl.where(lse == float("-inf"), float("inf"), lse if IS_NATURAL else lse * LOG2E)


@triton.jit
def softmax_weights(s, c, shift, IS_NATURAL: tl.constexpr):
    """Return the softmax weights of scores s.

    With a bias of 1e38 the rounding error of a product exceeds any exponent, so the difference is computed first, and a
    weight is at most 1."""
    return tl.math.exp2(tl.minimum((s - shift) * c, 0.0)) if IS_NATURAL else tl.math.exp2(s * c - shift)
