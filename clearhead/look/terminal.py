"""Pictures of attention for the terminal: shaded cells between the labels of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from clearhead._shapes import Float
from clearhead.errors import ShapeError

_SHADES = " ·░▒▓█"


def heatmap(weights: Float[Tensor, "T S"], rows: Sequence[str], columns: Sequence[str]) -> str:
    """One line a query, one column a key; the fuller the cell, the more weight. Labels stand beside and above."""
    if tuple(weights.shape) != (len(rows), len(columns)):
        raise ShapeError(
            f"weights are {tuple(weights.shape)} and there are {len(rows)} row and {len(columns)} column labels"
        )
    margin = max((len(row) for row in rows), default=0)
    widths = [max(len(column), 2) for column in columns]
    lines = [
        " " * margin
        + " "
        + " ".join(column.ljust(width) for column, width in zip(columns, widths, strict=True))
    ]
    for label, row in zip(rows, weights.tolist(), strict=True):
        cells = [shade(weight) * width for weight, width in zip(row, widths, strict=True)]
        lines.append(label.rjust(margin) + " " + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def shade(weight: float) -> str:
    """The character for a weight from 0 to 1."""
    return _SHADES[min(len(_SHADES) - 1, max(0, round(weight * (len(_SHADES) - 1))))]
