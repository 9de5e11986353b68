"""Tables as aligned text for terminals and as HTML for notebooks, without dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]


class RawHTML(str):
    """Cell that contains HTML, such as a small image, and is not escaped."""


class PreformattedText(str):
    """Text in columns that notebooks display preformatted, with its line breaks."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre;overflow-x:auto">{escape(self)}</pre>'


def table(rows: Rows, *, right: Sequence[int] = ()) -> str:
    """Return rows as aligned lines; the first row is the header and the columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.rjust(size) if i in right else cell.ljust(size) for i, (cell, size) in cells).rstrip()

    return "\n".join(map(line, rows))


def html_table(rows: Rows, *, right: Sequence[int] = (), caption: str = "") -> str:
    """Return rows as an HTML table. Every cell sets its alignment, because notebooks right-align by default."""

    def line(tag: str, row: Sequence[str]) -> str:
        cells = [cell if isinstance(cell, RawHTML) else escape(cell) for cell in row]
        sides = ["right" if i in right else "left" for i in range(len(row))]
        return "".join(f'<{tag} style="text-align:{s}">{cell}</{tag}>' for s, cell in zip(sides, cells, strict=True))

    head, *body = rows
    title = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    lines = "".join(f"<tr>{line('td', row)}</tr>" for row in body)
    element = f"<table>{title}<thead><tr>{line('th', head)}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div style="overflow-x:auto;margin:.5em 0">{element}</div>'
