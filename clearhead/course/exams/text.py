"""Question papers as Markdown and LaTeX."""

from __future__ import annotations

from clearhead.course.exams.content import Paper, PaperPart, PaperQuestion, n_lines
from clearhead.course.exercises import WorksheetStep
from clearhead.course.exercises.numbers import text as number_text
from clearhead.course.exercises.render.latex import words


def points_text(points: int) -> str:
    """Return points with their unit, such as "1 point".

    Example:
        >>> points_text(1), points_text(4)
        ('1 point', '4 points')
    """
    return f"{points} {'point' if points == 1 else 'points'}"


def markdown(paper: Paper) -> str:
    """Return a question paper as Markdown."""
    lines = [f"# {paper.title}", "", paper.exam.about, "", *[f"- {rule}" for rule in paper.rules]]
    if paper.exam.points:
        lines += ["", f"Total: {points_text(paper.exam.points)}."]
    for question in paper.questions:
        lines += ["", *_markdown_question(question)]
    return "\n".join(lines) + "\n"


def _markdown_question(question: PaperQuestion) -> list[str]:
    points = f" ({points_text(question.question.points)})" if question.question.points else ""
    lines = [f"## {question.number}. {question.question.title}{points}", ""]
    lines += [_escape(question.text), ""] if question.text else []
    for step in question.data:
        lines += [*_markdown_table(step, is_field=False), ""]
    lines += ["```python", question.program, "```", ""] if question.program else []
    for part in question.parts:
        lines += [_part_heading(part, _escape), "", *_markdown_answer(part)]
    return lines


def _part_heading(part: PaperPart, escape: object) -> str:
    text = escape(" ".join(part.part.text.split())) if callable(escape) else part.part.text
    if not part.label:
        return str(text)
    points = f" ({points_text(part.part.points)})" if part.part.points else ""
    return f"({part.label}) {text}{points}"


def _markdown_answer(part: PaperPart) -> list[str]:
    if part.options:
        return [*[f"- [ ] {letter}. {_escape(text)}" for letter, text in part.options], ""]
    if part.fields:
        return [line for step in part.fields for line in (*_markdown_table(step, is_field=True), "")]
    return [*([f"{part.space_label}:", ""] if part.space_label else []), *["<br>"] * n_lines(part.size), ""]


def _escape(text: str) -> str:
    for sign in "\\`*_[]<>|$":
        text = text.replace(sign, f"\\{sign}")
    return text


def _rows(step: WorksheetStep, *, is_field: bool) -> list[list[str]]:
    return [
        [value if isinstance(value, str) else "" if is_field else number_text(value) for value in row]
        for row in step.grid.cells
    ]


def _markdown_table(step: WorksheetStep, *, is_field: bool) -> list[str]:
    grid = step.grid
    if grid.is_scalar:
        value = "…………" if is_field else number_text(grid.cells[0][0])
        return [f"{_escape(step.symbol or step.title)} = {value}"]
    head = [_escape(step.symbol), *map(_escape, grid.columns)]
    body = [
        [_escape(name), *map(_escape, row)] for name, row in zip(grid.rows, _rows(step, is_field=is_field), strict=True)
    ]
    rule = ["---", *["---:"] * len(grid.columns)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def latex(paper: Paper) -> str:
    """Return a question paper as a LaTeX document."""
    lines = [
        r"\documentclass[11pt,a4paper]{article}",
        r"\usepackage{amsmath,amssymb}",
        r"\usepackage[margin=20mm]{geometry}",
        r"\setlength{\parindent}{0pt}",
        r"\begin{document}",
        rf"\section*{{{words(paper.title)}}}",
        words(paper.exam.about),
        r"\begin{itemize}",
        *[rf"\item {words(rule)}" for rule in paper.rules],
        r"\end{itemize}",
    ]
    for question in paper.questions:
        points = f" ({points_text(question.question.points)})" if question.question.points else ""
        lines += [rf"\subsection*{{{question.number}. {words(question.question.title)}{points}}}", words(question.text)]
        lines += [line for step in question.data for line in _latex_table(step, is_field=False)]
        lines += [r"\begin{verbatim}", question.program, r"\end{verbatim}"] if question.program else []
        for part in question.parts:
            lines += ["", _part_heading(part, words), *_latex_answer(part)]
    return "\n".join([*lines, r"\end{document}"]) + "\n"


def _latex_answer(part: PaperPart) -> list[str]:
    if part.options:
        options = [rf"\item[$\square$ {letter}] {words(text)}" for letter, text in part.options]
        return [r"\begin{itemize}", *options, r"\end{itemize}"]
    if part.fields:
        return [line for step in part.fields for line in _latex_table(step, is_field=True)]
    return [rf"\par\vspace{{{part.size}mm}}"]


def _latex_table(step: WorksheetStep, *, is_field: bool) -> list[str]:
    grid = step.grid
    if grid.is_scalar:
        value = r"\underline{\hspace{40mm}}" if is_field else words(number_text(grid.cells[0][0]))
        return [rf"\par {words(step.symbol or step.title)} = {value}\par"]
    head = " & ".join([words(step.symbol), *map(words, grid.columns)])
    body = [
        " & ".join([words(name), *map(words, row)])
        for name, row in zip(grid.rows, _rows(step, is_field=is_field), strict=True)
    ]
    lines = r" \\ \hline ".join([head, *body])
    return [rf"\par\begin{{tabular}}{{l|*{{{len(grid.columns)}}}{{c|}}}} {lines} \\ \end{{tabular}}\par"]
