"""Values and tables of the answers to the Transformer exercises."""

from __future__ import annotations

from clearhead.course.answers.content import AnswerTable

_WIDTH = 512


def bottleneck_width() -> int:
    """Return the width of the example."""
    return _WIDTH


def bottleneck_length() -> int:
    """Return the length at which projections and products cost the same."""
    return 2 * _WIDTH


def bottlenecks() -> AnswerTable:
    """Return the multiplications of projections and products by length."""
    rows = []
    for length in (16, 128, 1024, 8192, 65_536):
        projections, products = 4 * length * _WIDTH**2, 2 * length**2 * _WIDTH
        share = f"{projections / (projections + products):.1%}".replace("%", " %")
        rows.append([f"{length:,}", f"{projections:,}", f"{products:,}", share])
    return AnswerTable(["n", "projections, 4nd²", "products, 2n²d", "share of the projections"], rows)
