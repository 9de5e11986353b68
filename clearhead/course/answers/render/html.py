"""Render a booklet as a self-contained HTML page."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib import resources

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
from clearhead.course.answers.notation import Run, runs
from clearhead.course.answers.render.layout import answer_title, format_points, indentation
from clearhead.course.exercises.render.formats import fragment

_TAGS = {"strong": "strong", "emphasis": "em"}


def html(booklet: Booklet) -> str:
    """Render a booklet as one HTML page that needs no network."""
    whole = f"<h1>{escape(booklet.title)}</h1>{_contents(booklet)}" if booklet.is_whole else ""
    answers = "\n".join(_answer(booklet, answer) for answer in booklet.answers)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(booklet.title)}</title><style>{_style()}</style></head>"
        f"<body>\n{whole}\n{answers}\n</body></html>\n"
    )


@cache
def _style() -> str:
    return (resources.files("clearhead.course.answers.render") / "booklet.css").read_text(encoding="utf-8")


def _identifier(answer: ResolvedAnswer) -> str:
    return "answer-" + "".join(c if c.isalnum() else "-" for c in answer.location)


def _contents(booklet: Booklet) -> str:
    items = [
        f'<li><a href="#{_identifier(answer)}">{escape(answer.location)}</a><span>{_text(answer.title)}</span></li>'
        for answer in booklet.answers
    ]
    return f"<nav><ul>{''.join(items)}</ul></nav>"


def _answer(booklet: Booklet, answer: ResolvedAnswer) -> str:
    marks = "".join(
        f'<tr><td class="points">{format_points(mark.points)}</td><td>{_line(mark.line)}</td></tr>'
        for mark in answer.marks
    )
    commands = "".join(
        f"<li><code>{escape(command)}</code>: {_text(description)}</li>" for command, description in answer.commands
    )
    return (
        f'<article id="{_identifier(answer)}"><h2>{escape(answer_title(booklet, answer))}</h2>'
        f'<p class="question">{_text(answer.question)}</p>\n{"".join(map(_block, answer.blocks))}\n'
        f'<section class="scheme"><h3>Mark scheme</h3><table><tbody>{marks}</tbody></table>'
        f"<p>{escape(answer.scheme_note)}</p></section>\n"
        f'<section class="further"><h3>Further</h3><ul>{commands}</ul></section></article>'
    )


def _text(text: str, *, is_formula: bool = False) -> str:
    """Return text as HTML with typeset indices, powers and variables."""
    return "".join(_run(run) for run in runs(text, is_formula=is_formula))


def _run(run: Run) -> str:
    text = escape(run.text, quote=False)
    text = f"<i>{text}</i>" if run.is_variable else text
    tag = {1: "sup", -1: "sub"}.get(run.script)
    return f"<{tag}>{text}</{tag}>" if tag else text


def _line(line: Line) -> str:
    return "".join(map(_span, line))


def _span(span: Span) -> str:
    if span.style == "code":
        return f"<code>{escape(span.text, quote=False)}</code>"
    tag = _TAGS.get(span.style)
    return f"<{tag}>{_text(span.text)}</{tag}>" if tag else _text(span.text)


def _block(block: Block) -> str:
    match block:
        case Paragraph(line):
            return f"<p>{_line(line)}</p>\n"
        case Heading(level, line):
            return f"<h{level + 2}>{_line(line)}</h{level + 2}>\n"
        case BulletList(items, start):
            body = "".join(f"<li>{''.join(map(_block, item))}</li>" for item in items)
            return f"<ul>{body}</ul>\n" if start is None else f'<ol start="{start}">{body}</ol>\n'
        case Formula(formulas):
            body = "".join(
                f'<p style="margin-left: {indentation(formula) / 2:g}em">{_text(formula.strip(), is_formula=True)}</p>'
                for formula in formulas
            )
            return f'<div class="formula">{body}</div>\n'
        case Program(code):
            return f"<pre><code>{escape(code.rstrip(), quote=False)}</code></pre>\n"
        case TableBlock():
            return _table(block)
        case Picture(figure, caption):
            below = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
            return f"<figure>{figure.svg()}{below}</figure>\n"
        case Sheet(worksheet):
            return f'<div class="sheet">{fragment(worksheet)}</div>\n'
        case Box(title, inner, command):
            more = f"<p><code>{escape(command)}</code></p>" if command else ""
            return f'<aside><p class="title">{_text(title)}</p>{"".join(map(_block, inner))}{more}</aside>\n'


def _table(table: TableBlock) -> str:
    def row(cells: tuple[Line, ...], tag: str) -> str:
        parts = (
            f"<{tag}{' class=number' if is_right else ''}>{_line(cell)}</{tag}>"
            for cell, is_right in zip(cells, table.numeric, strict=True)
        )
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    below = f"<figcaption>{_text(table.caption)}</figcaption>" if table.caption else ""
    return (
        f'<figure class="table"><table><thead>{row(table.header, "th")}</thead>'
        f"<tbody>{body}</tbody></table>{below}</figure>\n"
    )
