"""A sheet as plain text whose columns line up, in as many columns as the terminal has: a wide matrix in parts."""

from __future__ import annotations

import textwrap
from functools import partial

from clearhead.work.sheet import Work
from clearhead.work.show.layout import TOO_LONG, Block, Style, blocks, closing

_INDENT = 3


def terminal(work: Work, style: Style | None = None) -> str:
    """The sheet as text; exact numbers to the left, decimals beside them where they fit, else below."""
    style = style or Style()
    _wrap = partial(wrapped, style.width)
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
        lines += ["   " + line for line in _body(block, style.width - _INDENT)]
        for letter, value in block.legend:
            lines += _wrap(f"{letter} = {value}", "   ")
        if block.note:
            lines += _wrap(block.note, "   ")
    for heading, sentences in closing(work, style):
        lines += ["", heading]
        for sentence in sentences:
            lines += _wrap(sentence, "   ", "-  ")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def wrapped(width: int, text: str, indent: str = "", bullet: str = "") -> list[str]:
    """Text in lines of at most `width` columns."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent + bullet,
        subsequent_indent=indent + " " * len(bullet),
        break_on_hyphens=False,
    )


def _body(block: Block, width: int) -> list[str]:
    if block.step.grid.is_one:
        exact, name = block.exact[0][0] or "________", block.step.symbol
        rounded = "" if block.decimals is None else f"≈ {block.decimals[0][0]}"
        line = " ".join(part for part in (f"{name} = {exact}".strip(), rounded) if part)
        if len(line) <= width:
            return [line]
        return [
            *wrapped(width, exact, "", f"{name} = ".lstrip()),
            *([f"{' ' * len(name)} {rounded}"] if rounded else []),
        ]
    left = _table(block.rows, block.columns, block.exact, width)
    if block.decimals is None:
        return left
    right = _table(block.rows, block.columns, block.decimals, width)
    pairs = [pair for rows in zip(block.exact, block.decimals, strict=True) for pair in zip(*rows, strict=True)]
    if all(exact in (TOO_LONG, rounded) for exact, rounded in pairs):
        return ["≈", *right]
    if len(left) == len(right) and len(left[0]) + len(right[0]) + 7 <= width:
        return [f"{a}{'   ≈   ' if i == 0 else '       '}{b}" for i, (a, b) in enumerate(zip(left, right, strict=True))]
    return [*left, "≈", *right]


def _table(rows: tuple[str, ...], columns: tuple[str, ...], cells: list[list[str]], width: int) -> list[str]:
    """A matrix with its names; one that is too wide is cut between columns, each part with the rows' names."""
    margin = max(len(row) for row in rows)
    widths = [max(len(name), 3, *[len(row[j]) for row in cells]) for j, name in enumerate(columns)]
    between = "  " if margin + sum(widths) + 2 * len(widths) <= width else " "
    parts, room = [[0]], width - margin - len(between) - widths[0]
    for j, w in enumerate(widths[1:], 1):
        room -= len(between) + w
        if room < 0:
            parts.append([])
            room = width - margin - len(between) - w
        parts[-1].append(j)
    lines: list[str] = []
    for part in parts:
        head = " " * margin + "".join(between + columns[j].rjust(widths[j]) for j in part)
        body = [
            name.ljust(margin) + "".join(between + (row[j] or "___").rjust(widths[j]) for j in part)
            for name, row in zip(rows, cells, strict=True)
        ]
        lines += [head, *body] if any(columns) else body
    return lines
