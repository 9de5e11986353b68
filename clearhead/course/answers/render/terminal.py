"""Render a booklet as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from clearhead.course.answers.blocks import (
    Block,
    Box,
    BulletList,
    Formula,
    Heading,
    Line,
    Paragraph,
    Picture,
    Program,
    Sheet,
    TableBlock,
)
from clearhead.course.answers.booklet import Booklet, ResolvedAnswer
from clearhead.course.answers.render.layout import answer_title, format_points, indentation
from clearhead.course.exercises.render import Style
from clearhead.course.exercises.render import terminal as sheet_in_terminal

_MIN_COLUMN = 8


def terminal(booklet: Booklet, width: int = 80) -> str:
    """Render a booklet as text of at most `width` columns; programs and drawings are not wrapped."""
    lines = [*_wrapped(booklet.title, width), ""] if booklet.is_whole else []
    for answer in booklet.answers:
        lines += [*_answer(booklet, answer, width), ""]
    return "\n".join(line.rstrip() for line in lines[:-1]) + "\n"


def _answer(booklet: Booklet, answer: ResolvedAnswer, width: int) -> list[str]:
    title = _wrapped(answer_title(booklet, answer), width)
    lines = [*title, "=" * max(map(len, title)), *_wrapped(answer.question, width)]
    lines += _blocks(answer.blocks, width)
    lines += ["", "Mark scheme", "-----------"]
    points = [format_points(mark.points) for mark in answer.marks]
    margin = max(map(len, points)) + 2
    for text, mark in zip(points, answer.marks, strict=True):
        lines += _wrapped(_text(mark.line), width, " " * margin, f"{text:>{margin - 2}}  ")
    lines += _wrapped(answer.scheme_note, width)
    lines += ["", "Further", "-------"]
    for command, description in answer.commands:
        lines += [f"  {command}", *_wrapped(description, width, "    ")]
    return lines


def _text(line: Line) -> str:
    """Return a line with code in backticks."""
    return "".join(f"`{span.text}`" if span.style == "code" else span.text for span in line)


def _wrapped(text: str, width: int, indent: str = "", first: str | None = None) -> list[str]:
    initial = indent if first is None else first
    lines = textwrap.wrap(
        text, width, initial_indent=initial, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines or [initial]


def _blocks(blocks: Sequence[Block], width: int) -> list[str]:
    """Render blocks, each below an empty line."""
    return [line for block in blocks for line in ("", *_block(block, width))]


def _block(block: Block, width: int) -> list[str]:
    match block:
        case Paragraph(line):
            return _wrapped(_text(line), width)
        case Heading(_, line):
            return [_text(line), "-" * len(_text(line))]
        case BulletList():
            return _list(block, width)
        case Formula(formulas):
            return [line for formula in formulas for line in _formula(formula, width)]
        case Program(code):
            return [f"    {line}" for line in code.rstrip().splitlines()]
        case TableBlock():
            return [*_table(block, width), *(_wrapped(block.caption, width) if block.caption else [])]
        case Picture(figure, caption):
            return [*figure.text(width).splitlines(), *(_wrapped(caption, width) if caption else [])]
        case Sheet(worksheet):
            lines = sheet_in_terminal(worksheet, Style(width=max(24, width - 2))).splitlines()
            return [f"│ {line}" for line in lines]
        case Box(title, inner, command):
            lines = [*_wrapped(title, width - 2), *_blocks(inner, width - 2), *(["", command] if command else [])]
            return [f"│ {line}" for line in lines]


def _formula(formula: str, width: int) -> list[str]:
    margin = " " * (4 + indentation(formula))
    return _wrapped(formula.strip(), width, margin + "  ", margin)


def _list(block: BulletList, width: int) -> list[str]:
    lines = []
    for i, item in enumerate(block.items):
        bullet = "- " if block.start is None else f"{block.start + i}. "
        inner: list[str] = []
        for j, part in enumerate(item):
            is_tight = j == 0 or isinstance(part, BulletList)
            inner += [*([] if is_tight else [""]), *_block(part, width - len(bullet))]
        lines += [f"{bullet if j == 0 else ' ' * len(bullet)}{line}" for j, line in enumerate(inner)]
    return lines


def _table(table: TableBlock, width: int) -> list[str]:
    """Render a table with aligned columns, whose cells are wrapped if it is too wide."""
    rows = [list(map(_text, row)) for row in (table.header, *table.rows)]
    widths = _column_widths(rows, width)
    if sum(widths) + 2 * (len(widths) - 1) > width:
        return list(_as_records(rows, width))
    lines = []
    for i, row in enumerate(rows):
        cells = [_wrapped(cell, size) for cell, size in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            parts = [cell[k] if k < len(cell) else "" for cell in cells]
            aligned = [
                part.rjust(size) if is_right else part.ljust(size)
                for part, size, is_right in zip(parts, widths, table.numeric, strict=True)
            ]
            lines.append("  ".join(aligned))
        if i == 0:
            lines.append("  ".join("-" * size for size in widths))
    return lines


def _column_widths(rows: list[list[str]], width: int) -> list[int]:
    """Return column widths; the widest column shrinks, to its longest word at most, until the table fits."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        shrinkable = [i for i, size in enumerate(widths) if size > max(least[i], _MIN_COLUMN)]
        if not shrinkable:
            break
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def _as_records(rows: list[list[str]], width: int) -> Iterator[str]:
    """Yield a table that does not fit as one paragraph per row."""
    header, *body = rows
    for row in body:
        yield from _wrapped(row[0], width)
        for name, cell in zip(header[1:], row[1:], strict=True):
            yield from _wrapped(f"{name}: {cell}", width, "    ", "  ")
