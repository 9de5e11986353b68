"""A sheet as plain text whose columns line up, in 80 columns wherever its numbers fit there."""

from __future__ import annotations

import textwrap

from clearhead.work.sheet import Work
from clearhead.work.show.layout import TOO_LONG, Block, Style, blocks, closing, is_plain

_WIDTH = 80


def terminal(work: Work, style: Style | None = None) -> str:
    """The sheet as text; exact numbers to the left, decimals beside them where they fit, else below."""
    style = style or Style()
    title = _wrap(work.title)
    lines = [*title, "=" * max(len(line) for line in title)]
    if work.source:
        lines += _wrap(f"From: {work.source}")
    if work.question:
        lines += ["", *_wrap(" ".join(work.question.split()))]
    for block in blocks(work, style):
        step = block.step
        given = "   (given)" if step.given else ""
        lines += ["", *_wrap(f"{step.title}   [{step.key}]{given}", bullet=f"{block.number}. ")]
        if step.formula:
            lines += _wrap(step.formula, "   ")
        lines += ["   " + line for line in _body(block)]
        for letter, value in block.legend:
            lines += _wrap(f"{letter} = {value}", "   ")
        if block.note:
            lines += _wrap(block.note, "   ")
    for heading, sentences in closing(work, style):
        lines += ["", heading]
        for sentence in sentences:
            lines += _wrap(sentence, "   ", "-  ")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _wrap(text: str, indent: str = "", bullet: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent + bullet,
        subsequent_indent=indent + " " * len(bullet),
        break_on_hyphens=False,
    )


def _body(block: Block) -> list[str]:
    if is_plain(block.step.grid):
        exact, name = block.exact[0][0] or "________", block.step.symbol
        if block.decimals is None:
            return [f"{name} = {exact}".strip()]
        rounded = f"≈ {block.decimals[0][0]}"
        if len(name) + len(exact) > 60:
            lines = _wrap(exact, "   ", f"{name} = ".lstrip())
            return [*[line[3:] for line in lines], f"{' ' * len(name)} {rounded}"]
        return [f"{name} = {exact} {rounded}".strip()]
    left = _table(block.rows, block.columns, block.exact)
    if block.decimals is None:
        return left
    right = _table(block.rows, block.columns, block.decimals)
    pairs = [pair for rows in zip(block.exact, block.decimals, strict=True) for pair in zip(*rows, strict=True)]
    if all(exact in (TOO_LONG, rounded) for exact, rounded in pairs):
        return ["≈", *right]
    gap = len(left[0]) + len(right[0]) + 7
    if gap + 3 <= _WIDTH:
        return [f"{a}{'   ≈   ' if i == 0 else '       '}{b}" for i, (a, b) in enumerate(zip(left, right, strict=True))]
    return [*left, "≈", *right]


def _table(rows: tuple[str, ...], columns: tuple[str, ...], cells: list[list[str]]) -> list[str]:
    width = max(len(row) for row in rows)
    widths = [max(len(name), 3, *[len(row[j]) for row in cells]) for j, name in enumerate(columns)]
    between = "  " if 3 + width + sum(widths) + 2 * len(widths) <= _WIDTH else " "
    head = " " * width + "".join(between + name.rjust(w) for name, w in zip(columns, widths, strict=True))
    body = [
        name.ljust(width) + "".join(between + (cell or "___").rjust(w) for cell, w in zip(row, widths, strict=True))
        for name, row in zip(rows, cells, strict=True)
    ]
    return [head, *body] if any(columns) else body
