"""Solution booklets as LaTeX documents."""

from __future__ import annotations

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
from clearhead.course.answers.render.layout import answer_title, format_points
from clearhead.course.exercises.render import latex as sheet_in_latex
from clearhead.course.exercises.render.latex import words

_BEGIN, _END = r"\begin{document}", r"\end{document}"
_HEAD = r"""\documentclass[11pt,a4paper]{article}
\usepackage{amsmath}
\usepackage{graphicx}
\usepackage[margin=20mm]{geometry}
\setlength{\parindent}{0pt}
\newcommand{\fitted}[1]{\[\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{$\displaystyle #1$}\]}"""


def latex(booklet: Booklet) -> str:
    """Return a booklet as a LaTeX document; drawings are in characters."""
    parts = [_HEAD, _BEGIN, rf"\section*{{{words(booklet.title)}}}"]
    parts += [_answer(booklet, answer) for answer in booklet.answers]
    return "\n\n".join([*parts, _END]) + "\n"


def _answer(booklet: Booklet, answer: ResolvedAnswer) -> str:
    marks = [rf"\item[{format_points(mark.points)}] {_line(mark.line)}" for mark in answer.marks]
    return "\n\n".join(
        [
            rf"\subsection*{{{words(answer_title(booklet, answer))}}}",
            rf"\textit{{{words(answer.question)}}}",
            *map(_block, answer.blocks),
            r"\textbf{Mark scheme}",
            "\n".join([r"\begin{itemize}", *marks, r"\end{itemize}"]),
            words(answer.scheme_note),
        ]
    )


def _line(line: Line) -> str:
    commands = {"strong": r"\textbf", "emphasis": r"\emph", "code": r"\texttt"}
    return "".join(
        f"{commands[span.style]}{{{words(span.text)}}}" if span.style in commands else words(span.text) for span in line
    )


def _verbatim(text: str) -> str:
    """Return characters as they are; those that LaTeX does not know are escaped."""
    lines = [words(line).replace(" ", "~") + r"\\" for line in text.rstrip().splitlines()]
    return "\n".join([r"{\ttfamily\footnotesize\noindent", *lines, "}"])


def _block(block: Block) -> str:
    match block:
        case Paragraph(line):
            return _line(line)
        case Heading(_, line):
            return rf"\paragraph{{{_line(line)}}}"
        case BulletList(items, start):
            kind = "itemize" if start is None else "enumerate"
            entries = [r"\item " + "\n\n".join(map(_block, item)) for item in items]
            return "\n".join([rf"\begin{{{kind}}}", *entries, rf"\end{{{kind}}}"])
        case Formula(formulas):
            return "\n".join([r"\begin{quote}", r" \\ ".join(map(words, formulas)), r"\end{quote}"])
        case Program(code):
            return _verbatim(code)
        case TableBlock(header, rows, numeric, caption):
            columns = "".join("r" if is_right else r"p{0.3\linewidth}" for is_right in numeric)
            lines = [" & ".join(map(_line, row)) for row in (header, *rows)]
            body = r" \\ ".join([f"{lines[0]} \\\\ \\hline {lines[1]}" if rows else lines[0], *lines[2:]])
            return f"\\begin{{tabular}}{{{columns}}} {body} \\end{{tabular}}\n\n{words(caption)}"
        case Picture(figure, caption):
            return f"{_verbatim(figure.text(90))}\n\n{words(caption)}"
        case Sheet(worksheet):
            return sheet_in_latex(worksheet).partition(_BEGIN)[2].partition(_END)[0]
        case Box(title, inner, command):
            tail = [rf"\texttt{{{words(command)}}}"] if command else []
            return "\n\n".join([rf"\textbf{{{words(title)}}}", *map(_block, inner), *tail])
