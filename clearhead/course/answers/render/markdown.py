"""Render a booklet as Markdown (CommonMark with tables)."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    Span,
    TableBlock,
)
from clearhead.course.answers.booklet import Booklet, ResolvedAnswer
from clearhead.course.answers.render.layout import answer_title, format_points
from clearhead.course.exercises.render import markdown as sheet_in_markdown

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


def markdown(booklet: Booklet) -> str:
    """Render a booklet as Markdown; drawings are in characters, formulas in blocks of code."""
    parts = [f"# {_escape(booklet.title)}"] if booklet.is_whole else []
    for answer in booklet.answers:
        parts += _answer(booklet, answer)
    return "\n\n".join(parts) + "\n"


def _answer(booklet: Booklet, answer: ResolvedAnswer) -> list[str]:
    parts = [f"## {_escape(answer_title(booklet, answer))}", _escape(answer.question)]
    parts += [_block(block) for block in answer.blocks]
    marks = [f"- **{format_points(mark.points)}**: {_line(mark.line)}" for mark in answer.marks]
    commands = [f"- `{command}`: {_escape(description)}" for command, description in answer.commands]
    return [*parts, "### Mark scheme", "\n".join(marks), answer.scheme_note, "### Further", "\n".join(commands)]


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def _line(line: Line) -> str:
    return "".join(map(_span, line))


def _span(span: Span) -> str:
    if span.style == "code":
        fence = "``" if "`" in span.text else "`"
        return f"{fence}{span.text}{fence}"
    mark = {"strong": "**", "emphasis": "*"}.get(span.style, "")
    stripped = span.text.strip()
    if not stripped:
        return span.text
    before, after = span.text.split(stripped, 1)
    return f"{before}{mark}{_escape(stripped)}{mark}{after}"


def _block(block: Block) -> str:
    match block:
        case Paragraph(line):
            return _line(line)
        case Heading(level, line):
            return f"{'#' * min(6, level + 1)} {_line(line)}"
        case BulletList():
            return _list(block)
        case Formula(formulas):
            return _fence("\n".join(formulas))
        case Program(code, _, language):
            return _fence(code, language)
        case TableBlock():
            return _table(block)
        case Picture(figure, caption):
            return _fence(figure.text(100)) + (f"\n\n{_escape(caption)}" if caption else "")
        case Sheet(worksheet):
            return re.sub(r"(?m)^#", "####", sheet_in_markdown(worksheet)).strip()
        case Box(title, inner, command):
            return _quoted([Paragraph((Span(title, "strong"),)), *inner], command)


def _quoted(blocks: Sequence[Block], command: str) -> str:
    text = "\n\n".join([*map(_block, blocks), *([f"`{command}`"] if command else [])])
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def _fence(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _list(block: BulletList) -> str:
    lines = []
    for i, item in enumerate(block.items):
        bullet = "- " if block.start is None else f"{block.start + i}. "
        text = "\n\n".join(map(_block, item)).splitlines()
        lines += [f"{bullet if j == 0 else ' ' * len(bullet)}{line}".rstrip() for j, line in enumerate(text)]
    return "\n".join(lines)


def _table(table: TableBlock) -> str:
    rule = ["---:" if is_right else "---" for is_right in table.numeric]
    rows = [[_line(cell) for cell in row] for row in (table.header, *table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]
    return "\n".join(lines) + (f"\n\n{_escape(table.caption)}" if table.caption else "")
