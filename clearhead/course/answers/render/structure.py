"""Return a booklet as JSON-compatible values."""

from __future__ import annotations

from clearhead.course.answers.blocks import (
    Block,
    Box,
    BulletList,
    Formula,
    Heading,
    Paragraph,
    Picture,
    Program,
    Sheet,
    TableBlock,
    plain_text,
)
from clearhead.course.answers.booklet import Booklet, ResolvedAnswer
from clearhead.course.exercises.render import to_dict as sheet_to_dict


def to_dict(booklet: Booklet) -> dict[str, object]:
    """Return a booklet as JSON-compatible values.

    Each block has a `type`: "paragraph", "heading", "list", "formula", "program", "table", "figure", "exercise" or
    "box". The docs describe their other keys.
    """
    answers = [_answer(answer) for answer in booklet.answers]
    return {"document": booklet.slug, "title": booklet.title, "answers": answers}


def _answer(answer: ResolvedAnswer) -> dict[str, object]:
    return {
        "location": answer.location,
        "title": answer.title,
        "question": answer.question,
        "points": None if answer.uses_default_total else answer.total,
        "answer": [_block(block) for block in answer.blocks],
        "mark_scheme": [{"points": float(mark.points), "text": plain_text(mark.line)} for mark in answer.marks],
        "total": answer.total,
        "note": answer.scheme_note,
        "commands": [{"command": command, "description": text} for command, text in answer.commands],
    }


def _block(block: Block) -> dict[str, object]:
    match block:
        case Paragraph(line):
            return {"type": "paragraph", "text": plain_text(line)}
        case Heading(level, line):
            return {"type": "heading", "level": level, "text": plain_text(line)}
        case BulletList(items, start):
            return {"type": "list", "start": start, "items": [[_block(part) for part in item] for item in items]}
        case Formula(formulas):
            return {"type": "formula", "lines": list(formulas)}
        case Program(code, is_executable, language):
            return {"type": "program", "language": language, "code": code, "is_executable": is_executable}
        case TableBlock(header, rows, _, caption):
            cells = [[plain_text(cell) for cell in row] for row in rows]
            return {"type": "table", "header": list(map(plain_text, header)), "rows": cells, "caption": caption}
        case Picture(figure, caption):
            return {"type": "figure", "svg": figure.svg(), "text": figure.text(80), "caption": caption}
        case Sheet(worksheet):
            return {"type": "exercise"} | sheet_to_dict(worksheet)
        case Box(title, inner, command):
            parts = [_block(part) for part in inner]
            return {"type": "box", "title": title, "command": command, "blocks": parts}
