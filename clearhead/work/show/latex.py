"""A sheet as a LaTeX document that needs amsmath and graphicx alone, in plain ASCII."""

from __future__ import annotations

import re

import sympy

from clearhead.work.numbers import Number
from clearhead.work.sheet import Work
from clearhead.work.show.layout import TOO_LONG, Block, Style, blocks, closing

_HEAD = r"""\documentclass[11pt,a4paper]{article}
\usepackage{amsmath}
\usepackage{graphicx}
\usepackage[margin=20mm]{geometry}
\setlength{\parindent}{0pt}
\newcommand{\fitted}[1]{\[\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{$\displaystyle #1$}\]}
\begin{document}"""

MATH = {
    "−": "-", "·": r"\cdot", "×": r"\times", "≈": r"\approx", "→": r"\to", "∞": r"\infty", "√": r"\surd", "≤": r"\le",
    "≥": r"\ge", "∂": r"\partial", "Σ": r"\Sigma", "γ": r"\gamma", "β": r"\beta", "σ": r"\sigma", "μ": r"\mu",
    "ε": r"\varepsilon", "π": r"\pi", "ℓ": r"\ell", "∘": r"\circ", "‖": r"\|", "²": "^2", "ᵀ": r"^{\top}",
    "⌊": r"\lfloor", "⌋": r"\rfloor", "…": r"\ldots", "⌈": r"\lceil", "⌉": r"\rceil", "≠": r"\ne", "⊙": r"\odot",
    "λ": r"\lambda", "η": r"\eta", "α": r"\alpha", "δ": r"\delta", "Δ": r"\Delta", "Θ": r"\Theta", "ŷ": r"\hat y",
    "ν": r"\nu", "′": "'", "″": "''", "³": "^3", "⁴": "^4", "∈": r"\in", "₀": "_0", "₁": "_1", "₂": "_2", "₃": "_3",
}  # fmt: skip
TEXT = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "“": "``", "”": "''", "’": "'",
}  # fmt: skip


def latex(work: Work, style: Style | None = None) -> str:
    """The sheet as a complete document."""
    style = style or Style()
    lines = [_HEAD, rf"\section*{{{words(work.title)}}}"]
    if work.source:
        lines.append(rf"From: {words(work.source)}\par")
    if work.question:
        lines.append(rf"{words(' '.join(work.question.split()))}\par")
    for block in blocks(work, style, number_in_latex, _word):
        step = block.step
        given = ", given" if step.given else ""
        lines.append(rf"\subsection*{{{block.number}. {words(step.title)} (\texttt{{{words(step.key)}}}{given})}}")
        if step.latex:
            lines.append(rf"\fitted{{{step.latex}}}")
        lines += [rf"\fitted{{{part}}}" for part in _body(block)]
        lines += [rf"\fitted{{{letter} = {value}}}" for letter, value in block.legend]
        if block.note:
            lines.append(rf"{words(block.note)}\par")
    for heading, sentences in closing(work, style):
        lines += [rf"\subsection*{{{words(heading)}}}", r"\begin{itemize}"]
        lines += [rf"\item {words(sentence)}" for sentence in sentences]
        lines.append(r"\end{itemize}")
    return "\n".join([*lines, r"\end{document}"]) + "\n"


def words(text: str) -> str:
    """Prose, with every special character said in LaTeX's way."""
    return "".join(
        TEXT.get(c) or (f"${MATH[c]}$" if c in MATH else c if c.isascii() else f"[U+{ord(c):04X}]") for c in text
    )


def symbol_in_latex(name: str) -> str:
    """A symbol in a formula: letters keep their indices, and words stay upright."""

    def piece(found: re.Match[str]) -> str:
        head, index = found[1], found[2]
        if head.isascii() and head.isalpha() and len(head) > 2:
            head = rf"\mathrm{{{head}}}"
        else:
            head = "".join(MATH[c] + (" " if MATH[c][-1].isalpha() else "") if c in MATH else c for c in head)
        return f"{head.strip()}_{{{words(index)}}}" if index else head

    return re.sub(r"([A-Za-z]+|.)(?:_(\w+))?", piece, name).strip()


def number_in_latex(x: Number) -> str:
    return str(sympy.latex(x))


def _word(text: str) -> str:
    return rf"\text{{{words(text)}}}"


def _cell(text: str, exact: bool) -> str:
    """Exact numbers and words are LaTeX already; a decimal may have a power of ten."""
    if not text or text == TOO_LONG:
        return r"\ldots" if text else r"\phantom{0.0000}"
    if exact or text.startswith(r"\text"):
        return text
    plain = text.replace("−", "-").replace("∞", r"\infty")
    return re.sub(r"e(-?\d+)$", r" \\times 10^{\1}", plain)


def _body(block: Block) -> list[str]:
    if block.step.grid.is_one:
        exact = _cell(block.exact[0][0], True)
        return [rf"= {exact}" + ("" if block.decimals is None else rf" \approx {_cell(block.decimals[0][0], False)}")]
    parts = [_array(block, block.exact, True)]
    if block.decimals is not None:
        parts.append(r"\approx " + _array(block, block.decimals, False))
    return parts


def _array(block: Block, cells: list[list[str]], exact: bool) -> str:
    head = " & ".join(["", *[rf"\text{{{words(name)}}}" for name in block.columns]])
    body = [
        " & ".join([rf"\text{{{words(name)}}}", *[_cell(cell, exact) for cell in row]])
        for name, row in zip(block.rows, cells, strict=True)
    ]
    shape = "l|" + "r" * len(block.columns)
    return rf"\begin{{array}}{{{shape}}} {head} \\ \hline " + r" \\ ".join(body) + r" \end{array}"
