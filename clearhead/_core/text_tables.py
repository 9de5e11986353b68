"""A table for people, without a library: for a terminal as lines of text, for a notebook as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]


class Markup(str):
    """A cell that is HTML already, such as a small picture."""


class Printed(str):
    """Text in columns, which a notebook shows as it would be printed and not as one line with \\n in it."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre;overflow-x:auto">{escape(self)}</pre>'


def table(rows: Rows, *, right: Sequence[int] = ()) -> str:
    """Rows as lines, the first is the heading; the columns in `right` end together, the others begin together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.rjust(size) if i in right else cell.ljust(size) for i, (cell, size) in cells).rstrip()

    return "\n".join(map(line, rows))


def html_table(rows: Rows, *, right: Sequence[int] = (), caption: str = "") -> str:
    """The same rows as HTML. Notebooks set every cell to the right, so each says where it stands."""

    def line(tag: str, row: Sequence[str]) -> str:
        cells = [cell if isinstance(cell, Markup) else escape(cell) for cell in row]
        sides = ["right" if i in right else "left" for i in range(len(row))]
        return "".join(f'<{tag} style="text-align:{s}">{cell}</{tag}>' for s, cell in zip(sides, cells, strict=True))

    head, *body = rows
    title = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    lines = "".join(f"<tr>{line('td', row)}</tr>" for row in body)
    whole = f"<table>{title}<thead><tr>{line('th', head)}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div style="overflow-x:auto;margin:.5em 0">{whole}</div>'
