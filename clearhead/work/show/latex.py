"""A sheet as a LaTeX document that needs amsmath and graphicx alone, in plain ASCII."""

from __future__ import annotations

import re

import sympy

from clearhead.work.numbers import Number
from clearhead.work.sheet import Work
from clearhead.work.show.layout import PLAIN, TOO_LONG, Block, Style, rendered

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


def latex(work: Work, style: Style = PLAIN) -> str:
    """The sheet as a complete document."""
    lines = rendered(work, style, {
        "title": lambda title: [_HEAD, rf"\section*{{{words(title)}}}"],
        "source": lambda source: [rf"{words(source)}\par"],
        "question": lambda question: [rf"{words(question)}\par"],
        "step": _step,
        "legend": lambda legend: [rf"\fitted{{{letter} = {value}}}" for letter, value in legend],
        "note": lambda note: [rf"{words(note)}\par"],
        "section": lambda said: [
            rf"\subsection*{{{words(said[0])}}}", r"\begin{itemize}", *[rf"\item {words(one)}" for one in said[1]],
            r"\end{itemize}",
        ],
    }, number_in_latex, _word)  # fmt: skip
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


def _step(block: Block) -> list[str]:
    step, rounded = block.step, block.decimals
    given = ", given" if step.given else ""
    heading = rf"\subsection*{{{block.number}. {words(step.title)} (\texttt{{{words(step.key)}}}{given})}}"
    parts = [step.latex] if step.latex else []
    if step.grid.is_one:
        about = "" if rounded is None else rf" \approx {_cell(rounded[0][0], False)}"
        parts.append(f"= {_cell(block.exact[0][0], True)}{about}")
    else:
        parts.append(_array(block, block.exact, True))
        parts += [] if rounded is None else [r"\approx " + _array(block, rounded, False)]
    return [heading, *[rf"\fitted{{{part}}}" for part in parts]]


def _array(block: Block, cells: list[list[str]], exact: bool) -> str:
    rows = [["", *map(_word, block.columns)]]
    rows += [[_word(name), *[_cell(x, exact) for x in row]] for name, row in zip(block.rows, cells, strict=True)]
    head, *body = (" & ".join(row) for row in rows)
    shape = "l|" + "r" * len(block.columns)
    return rf"\begin{{array}}{{{shape}}} {head} \\ \hline " + r" \\ ".join(body) + r" \end{array}"
