"""Render a booklet as a PDF by way of Typst."""

from __future__ import annotations

import json
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
from clearhead.course.exercises import Worksheet
from clearhead.course.exercises.render import Style
from clearhead.course.exercises.render.latex import math, number_in_latex
from clearhead.course.exercises.render.layout import StepBlock, closing_sections, step_blocks
from clearhead.errors import optional_dependency

_SHORTEST_FORMULA = 6  # a lone Σ says less than the words "their sum"


def pdf(booklet: Booklet) -> bytes:
    """Return a booklet as a PDF.

    Raises:
        MissingDependencyError: If typst is not installed.
    """
    with optional_dependency("a PDF needs typst: pip install 'clearhead[course]', or write .html or .md"):
        import typst
    return bytes(typst.compile(typst_source(booklet).encode()))


def typst_source(booklet: Booklet) -> str:
    """Return a booklet as a Typst document."""
    template = (resources.files("clearhead.course.answers.render") / "booklet.typ").read_text(encoding="utf-8")
    title = f"#booklet-title({_string(booklet.title)})" if booklet.is_whole else ""
    return "\n".join([template, title, *[_answer(booklet, answer) for answer in booklet.answers]]) + "\n"


def _answer(booklet: Booklet, answer: ResolvedAnswer) -> str:
    marks = "".join(f"({_string(format_points(mark.points))}, {_line(mark.line)})," for mark in answer.marks)
    return "\n".join(
        [
            f"#answer-title({_string(answer_title(booklet, answer))}, {_text(answer.question)})",
            *map(_block, answer.blocks),
            f"#scheme(({marks}), {_string(answer.scheme_note)})",
        ]
    )


def _string(text: str) -> str:
    """Return a Typst string literal."""
    return json.dumps(text, ensure_ascii=False)


def _text(text: str, *, is_formula: bool = False) -> str:
    """Return text as Typst content with typeset indices, powers and variables."""
    return f"[{''.join(_run(run) for run in runs(text, is_formula=is_formula))}]"


def _run(run: Run) -> str:
    code = f"variable({_string(run.text)})" if run.is_variable else _string(run.text)
    function = {1: "above", -1: "below"}.get(run.script)
    return f"#{function}({code});" if function else f"#{code};"


def _formula(formula: str) -> str:
    """Return the indentation in em and the content of a formula."""
    return f"({indentation(formula) / 2:g}, {_text(formula.strip(), is_formula=True)}),"


def _line(line: Line) -> str:
    return f"[{''.join(map(_span, line))}]"


def _span(span: Span) -> str:
    if span.style == "code":
        return f"#raw({_string(span.text)});"
    function = {"strong": "strong", "emphasis": "slanted"}.get(span.style)
    return f"#{function}({_text(span.text)});" if function else _text(span.text)[1:-1]


def _paragraph_function(line: Line) -> str:
    """Return the Typst function for a paragraph; one that ends with a colon belongs to the next block."""
    return "introduction" if line and line[-1].text.rstrip().endswith(":") else "par"


def _content(blocks: tuple[Block, ...]) -> str:
    return "[" + "\n".join(map(_block, blocks)) + "]"


def _block(block: Block) -> str:
    match block:
        case Paragraph((Span(_, "strong"),) as line):
            return f"#inner-heading(3, {_line((Span(line[0].text),))})"
        case Paragraph(line):
            return f"#{_paragraph_function(line)}({_line(line)})"
        case Heading(level, line):
            return f"#inner-heading({level}, {_line(line)})"
        case BulletList(items, start):
            body = "".join(f"{_content(item)}," for item in items)
            return f"#list({body})" if start is None else f"#enum(start: {start}, {body})"
        case Formula(formulas):
            return f"#formula(({''.join(map(_formula, formulas))}))"
        case Program(code):
            return f"#program({_string(code.rstrip())})"
        case TableBlock():
            return _table(block)
        case Picture(figure, caption):
            return f"#picture({_string(figure.svg())}, {_text(caption)})"
        case Sheet(worksheet):
            return f'#framed({_text(worksheet.title)}, {_sheet(worksheet)}, "")'
        case Box(title, inner, command):
            return f"#framed({_text(title)}, {_content(inner)}, {_string(command)})"


def _table(table: TableBlock) -> str:
    cells = "".join(f"{_line(cell)}," for row in (table.header, *table.rows) for cell in row)
    alignment = "".join("right," if is_right else "left," for is_right in table.numeric)
    return f"#plain-table(({alignment}), ({cells}), {_text(table.caption)})"


# ---------------------------------------------------------------------- worksheets


def _sheet(worksheet: Worksheet) -> str:
    parts = [_step(block) for block in step_blocks(worksheet, Style(), number_in_latex)]
    for title, sentences in closing_sections(worksheet, Style()):
        parts.append(f"#inner-heading(2, {_text(title)})")
        parts.append(f"#list({''.join(f'{_text(sentence)},' for sentence in sentences)})")
    return "[" + "\n".join(parts) + "]"


def _step(block: StepBlock) -> str:
    step = block.step
    parts = [f"#inner-heading(3, {_text(f'{block.number}. {step.title}')})"]
    is_formula = len(step.latex) >= _SHORTEST_FORMULA and not step.latex.startswith(r"\text{")
    derivation = _math(step.latex) if is_formula else ""
    if derivation or step.formula:
        parts.append(f"#derivation({derivation or _text(step.formula)})")
    tables = [] if block.is_decimal_only else [_cells(block, block.exact, is_exact=True)]
    if block.decimals is not None:
        tables.append(f"approximately({_cells(block, block.decimals, is_exact=False)})")
    parts.append(f"#side-by-side(({', '.join(tables)},))")
    for letter, value in block.legend:
        typeset = _math(value) or _text(value)
        parts.append(f"#par[#emph({_string(letter)}); = {typeset[1:-1]}]")
    if block.note:
        parts.append(f"#par({_text(block.note)})")
    return f"#block(breakable: false, width: 100%, [{' '.join(parts)}])"


def _cells(block: StepBlock, cells: list[list[str]], *, is_exact: bool) -> str:
    values = block.step.grid.cells
    body = "".join(
        f"({''.join(f'{_cell(text, value, is_exact)},' for text, value in zip(row, numbers, strict=True))}),"
        for row, numbers in zip(cells, values, strict=True)
    )
    labels = ["".join(f"{_label(name)}," for name in names) for names in (block.rows, block.columns)]
    return f"[#matrix(({labels[0]}), ({labels[1]}), ({body}))]"


def _label(name: str) -> str:
    """Return the name of a row or column; an empty one is a string, which the layout tests for."""
    return _text(name) if name else _string(name)


def _cell(text: str, value: object, is_exact: bool) -> str:
    typeset = _math(text) if is_exact and not isinstance(value, str) else ""
    return typeset or _text(text)


def _math(latex: str) -> str:
    """Return mathematics as Typst content; empty if Typst cannot express it."""
    try:
        code = math(latex) if latex else ""
    except LookupError:
        return ""
    return f"[#sheet-math({_string(code)});]" if code else ""
