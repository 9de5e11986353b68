"""Render a worksheet as an ASCII LaTeX document (amsmath and graphicx), and its mathematics for Typst."""

from __future__ import annotations

import re
from collections.abc import Iterator

import sympy

from clearhead.course.exercises.numbers import Number
from clearhead.course.exercises.render.layout import PLAIN, TOO_LONG, StepBlock, Style, render
from clearhead.course.exercises.sheet import Worksheet

_HEAD = r"""\documentclass[11pt,a4paper]{article}
\usepackage{amsmath}
\usepackage{graphicx}
\usepackage[margin=20mm]{geometry}
\setlength{\parindent}{0pt}
\newcommand{\fitted}[1]{\[\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{$\displaystyle #1$}\]}
\begin{document}"""

_MATH = {
    "−": "-", "·": r"\cdot", "×": r"\times", "≈": r"\approx", "→": r"\to", "∞": r"\infty", "√": r"\surd", "≤": r"\le",
    "≥": r"\ge", "∂": r"\partial", "Σ": r"\Sigma", "γ": r"\gamma", "β": r"\beta", "σ": r"\sigma", "μ": r"\mu",
    "ε": r"\varepsilon", "π": r"\pi", "ℓ": r"\ell", "∘": r"\circ", "‖": r"\|", "²": "^2", "ᵀ": r"^{\top}",
    "⌊": r"\lfloor", "⌋": r"\rfloor", "…": r"\ldots", "⌈": r"\lceil", "⌉": r"\rceil", "≠": r"\ne", "⊙": r"\odot",
    "λ": r"\lambda", "η": r"\eta", "α": r"\alpha", "δ": r"\delta", "Δ": r"\Delta", "Θ": r"\Theta", "ŷ": r"\hat y",
    "ω": r"\omega", "ν": r"\nu", "′": "'", "″": "''", "³": "^3", "⁴": "^4", "∈": r"\in", "₀": "_0", "₁": "_1",
    "₂": "_2", "₃": "_3", "Π": r"\Pi", "⋯": r"\cdots",
}  # fmt: skip
_TEXT = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "“": "``", "”": "''", "’": "'",
}  # fmt: skip


def latex(worksheet: Worksheet, style: Style = PLAIN) -> str:
    """Render as a complete LaTeX document."""
    lines = render(worksheet, style, {
        "title": lambda title: [_HEAD, rf"\section*{{{words(title)}}}"],
        "source": lambda source: [rf"{words(source)}\par"],
        "question": lambda question: [rf"{words(question)}\par"],
        "step": _step,
        "legend": lambda legend: [rf"\fitted{{{letter} = {value}}}" for letter, value in legend],
        "note": lambda note: [rf"{words(note)}\par"],
        "section": lambda section: [
            rf"\subsection*{{{words(section[0])}}}", r"\begin{itemize}",
            *[rf"\item {words(sentence)}" for sentence in section[1]],
            r"\end{itemize}",
        ],
    }, number_in_latex, _word)  # fmt: skip
    return "\n".join([*lines, r"\end{document}"]) + "\n"


def words(text: str) -> str:
    """Escape prose for LaTeX."""
    return "".join(
        _TEXT.get(c) or (f"${_MATH[c]}$" if c in _MATH else c if c.isascii() else f"[U+{ord(c):04X}]") for c in text
    )


def symbol_in_latex(name: str) -> str:
    """Format a symbol: letters keep their indices, words are upright."""

    def piece(match: re.Match[str]) -> str:
        head = match[1]
        index = words(match[2]) if match[2] else _MATH["∞"] if match[3] else ""
        if head.isascii() and head.isalpha() and len(head) > 2:
            head = rf"\mathrm{{{head}}}"
        else:
            head = "".join(_MATH[c] + (" " if _MATH[c][-1].isalpha() else "") if c in _MATH else c for c in head)
        return f"{head.strip()}_{{{index}}}" if index else head

    return re.sub(r"([A-Za-z]+|.)(?:_(\w+)|(∞))?", piece, name).strip()


def number_in_latex(x: Number) -> str:
    return str(sympy.latex(x))


def _word(text: str) -> str:
    return rf"\text{{{words(text)}}}"


def _cell(text: str, exact: bool) -> str:
    """Format a cell; exact numbers and words are LaTeX already, decimals may have a power of ten."""
    if not text or text == TOO_LONG:
        return r"\ldots" if text else r"\phantom{0.0000}"
    if exact or text.startswith(r"\text"):
        return text
    plain = text.replace("−", "-").replace("∞", r"\infty")
    return re.sub(r"e(-?\d+)$", r" \\times 10^{\1}", plain)


def _step(block: StepBlock) -> list[str]:
    step, rounded = block.step, block.decimals
    label = ", given" if step.is_given else ""
    heading = rf"\subsection*{{{block.number}. {words(step.title)} (\texttt{{{words(step.key)}}}{label})}}"
    parts = [step.latex] if step.latex else []
    if step.grid.is_scalar:
        about = "" if rounded is None else rf" \approx {_cell(rounded[0][0], False)}"
        parts.append(about.strip() if block.is_decimal_only else f"= {_cell(block.exact[0][0], True)}{about}")
    else:
        parts += [] if block.is_decimal_only else [_array(block, block.exact, True)]
        parts += [] if rounded is None else [r"\approx " + _array(block, rounded, False)]
    return [heading, *[rf"\fitted{{{part}}}" for part in parts]]


def _array(block: StepBlock, cells: list[list[str]], exact: bool) -> str:
    rows = [["", *map(_word, block.columns)]]
    rows += [[_word(name), *[_cell(x, exact) for x in row]] for name, row in zip(block.rows, cells, strict=True)]
    head, *body = (" & ".join(row) for row in rows)
    shape = "l|" + "r" * len(block.columns)
    return rf"\begin{{array}}{{{shape}}} {head} \\ \hline " + r" \\ ".join(body) + r" \end{array}"


# ---------------------------------------------------------------------- for Typst: the part of LaTeX that steps use

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
_SIGNS = {code: sign for sign, code in _MATH.items() if code.startswith("\\")} | {
    r"\top": "⊤", r"\sum": "sum", r"\prod": "product", r"\quad": "quad", r"\lVert": "‖", r"\rVert": "‖", r"\lvert": "|",
    r"\rvert": "|", r"\textstyle": "", r"\,": "thin", r"\{": r"\{", r"\}": r"\}", r"\_": r"\_", r"\neq": "≠",
    r"\mid": "|", r"\;": "med", r"\dots": "…", r"\cdots": "⋯",
}  # fmt: skip
_LONGEST_UNGROUPED = 3  # digits of a number that is written without commas
_NAMES = re.compile(
    "alpha|beta|gamma|delta|epsilon|eta|lambda|mu|nu|pi|sigma|tau|phi|rho|theta|omega|Sigma|Delta|Theta|lim|max|min|log|exp|"
    "sin|cos|tanh|det"
)
_ESCAPED = {"/": r"\/", ",": r"\,", ";": r"\;", '"': r"\"", "#": r"\#", "$": r"\$", "&": r"\&", "@": r"\@", "~": ""}


def math(latex: str) -> str:
    """Translate LaTeX mathematics to Typst; raise LookupError for unknown commands."""
    latex = re.sub(r"(?<=frac)(\d)(\d)", r"{\1}{\2}", latex)
    latex = re.sub(r"(?<![\d.])(\d{4,})(?=\^)", r"\\mathrm{\1}", latex)  # a base such as 10000 has no comma
    return _group(iter(_TOKEN.findall(latex)))


def _group(tokens: Iterator[str], end: str = "") -> str:
    parts: list[str] = []
    for token in tokens:
        if token == end:
            break
        parts.append(_translate(token, tokens))
    return " ".join(part for part in parts if part)


def _translate(token: str, tokens: Iterator[str]) -> str:
    """Translate a token and its arguments."""
    if token == "{":
        return _group(tokens, "}")
    if token in "^_":
        return f"{token}({_next_argument(tokens)})"
    if token in (r"\frac", r"\tfrac", r"\dfrac"):
        return f"frac({_next_argument(tokens)}, {_next_argument(tokens)})"
    if token == r"\sqrt" and (first := next(tokens, "")) == "[":
        return f"root({_group(tokens, ']')}, {_next_argument(tokens)})"
    if token == r"\sqrt":
        return f"sqrt({_translate(first, tokens)})"
    if token == r"\mathbf":
        return f"bold({_next_argument(tokens)})"
    if token in (r"\text", r"\mathrm", r"\operatorname"):
        return f'op("{_unescaped(tokens)}")' if token == r"\operatorname" else f'"{_unescaped(tokens)}"'
    if token in (r"\left", r"\right"):
        return _translate(next(tokens), tokens).replace(".", "")
    if token in _SIGNS:
        return _SIGNS[token]
    if token.startswith("\\"):
        name = token[1:].removeprefix("var")
        if not _NAMES.fullmatch(name):
            raise LookupError(f"{token} is unknown")
        return name
    if token.isdigit() and len(token) > _LONGEST_UNGROUPED:
        return f"{int(token):,}".replace(",", r' class("normal", \,) ')
    return _ESCAPED.get(token, token.strip())


def _next_argument(tokens: Iterator[str]) -> str:
    """The group or the single token that comes next."""
    token = next(tokens, "")
    return _next_argument(tokens) if token.isspace() else _translate(token, tokens)


def _unescaped(tokens: Iterator[str]) -> str:
    """Prose in braces, with what LaTeX escapes said plainly again."""
    depth = 0
    section = ""
    for token in tokens:
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth == 0:
            break
        section += token if depth > 1 or token != "{" else ""
    for sign, code in {**{s: f"${c}$" for s, c in _MATH.items()}, **_TEXT}.items():
        section = section.replace(code, sign)
    return section.replace("\\", "\\\\").replace('"', r"\"")
