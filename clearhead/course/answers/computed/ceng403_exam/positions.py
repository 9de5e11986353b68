"""Question 4: position encodings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from clearhead.course.answers.content import AnswerFigure, AnswerTable, format_vector

if TYPE_CHECKING:
    from torch import Tensor

_POSITIONS, _WIDTH = 1000, 512


def _encoding(base: float = 10_000.0) -> Tensor:
    """Return the encoding of 1,000 positions at width 512 in float64."""
    import torch

    from clearhead.nn.positions import Sinusoidal

    return Sinusoidal(base=base).table(_POSITIONS, _WIDTH, dtype=torch.float64)


def _wavelengths(base: float = 10_000.0) -> list[float]:
    return [2 * math.pi * base ** (2 * i / _WIDTH) for i in range(_WIDTH // 2)]


def sinusoid_norm() -> str:
    """Return the norm of every encoding."""
    norms = _encoding().norm(dim=1)
    return f"{norms.mean().item():.6g}"


def shortest_wavelength() -> float:
    """Return the wavelength of the first pair."""
    return _wavelengths()[0]


def longest_wavelength() -> str:
    """Return the wavelength of the last pair."""
    return f"{_wavelengths()[-1]:,.0f}"


def slow_pairs() -> int:
    """Return the number of pairs whose wavelength exceeds the number of positions."""
    return sum(wavelength > _POSITIONS for wavelength in _wavelengths())


def slowest_turn() -> float:
    """Return the part of a turn that the slowest pair makes over all positions."""
    return _POSITIONS / _wavelengths()[-1]


def least_base() -> str:
    """Return n/(2π), the base at which the slowest pair makes one turn over all positions."""
    return f"{_POSITIONS / (2 * math.pi):.0f}"


def closest_positions() -> float:
    """Return the smallest distance of two encodings; distances depend on the offset alone."""
    encoding = _encoding()
    return (encoding - encoding[0]).norm(dim=1)[1:].min().item()


def _similarities(base: float) -> list[float]:
    """Return PE(p)·PE(p + k)/(d/2) by distance k."""
    encoding = _encoding(base)
    similarities: list[float] = (encoding @ encoding[0] / (_WIDTH // 2)).tolist()
    return similarities


def bases() -> AnswerTable:
    """Return, by base, the longest wavelength and the similarity of positions by their distance."""
    distances = (1, 10, 100, 500)
    rows: list[list[str | int | float]] = []
    for base in (10, 100, 1_000, 10_000, 1_000_000):
        wavelengths, similarities = _wavelengths(base), _similarities(float(base))
        slow = sum(wavelength > _POSITIONS for wavelength in wavelengths)
        columns = [f"{similarities[k]:z.2f}".replace("-", "−") for k in distances]
        rows.append([f"{base:,}", f"{wavelengths[-1]:,.0f}", slow, *columns])
    header = ["base", "longest wavelength", "pairs below one turn", *(f"k = {k}" for k in distances)]
    return AnswerTable(header, rows, "1,000 positions, width 512; the last columns are PE(p)·PE(p + k)/(d/2).")


def position_similarity() -> AnswerFigure:
    """Return the dot product of two encodings over their distance."""
    from clearhead.course.claims.figure import Lines

    products = _similarities(10_000.0)
    offsets = list(range(0, 201, 2))
    return Lines(
        "Similarity of two positions by their distance",
        "distance k",
        "PE(p)·PE(p + k) / (d/2)",
        offsets,
        {"width 512, base 10000": [products[k] for k in offsets]},
    )


def learned_parameters() -> int:
    """Return the parameters of a learned table."""
    from clearhead.nn.positions import LearnedPositions

    return sum(p.numel() for p in LearnedPositions(max_len=_POSITIONS).build(_WIDTH).parameters())


def sinusoid_parameters() -> int:
    """Return the parameters of the sinusoidal encoding."""
    from clearhead.nn.positions import Sinusoidal

    return sum(p.numel() for p in Sinusoidal().build(_WIDTH).parameters())


def learned_share() -> str:
    """Return the learned table's share of a layer with 4·d² + 8·d² parameters."""
    return f"{learned_parameters() / (12 * _WIDTH**2):.0%}".replace("%", " %")


def divisor_1() -> str:
    """Return the divisor of pair 1."""
    return f"{10_000 ** (2 / _WIDTH):.4f}"


def angle_1() -> str:
    """Return the angle of pair 1 at position 3."""
    return f"{3 / 10_000 ** (2 / _WIDTH):.4f}"


def encoding_3() -> str:
    """Return the first four entries of the encoding of position 3."""
    return format_vector(_encoding()[3, :4], ".4f")


def sine_of_3_degrees() -> str:
    """Return sin 3°."""
    return f"{math.sin(math.radians(3)):.4f}"
