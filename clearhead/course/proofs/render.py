"""Render proofs: for the terminal, as Markdown, HTML, LaTeX and JSON."""

from __future__ import annotations

import ast
import textwrap
from html import escape

from clearhead.course.answers.notation import runs
from clearhead.course.exercises.render.latex import words
from clearhead.course.proofs.notation import Html, Latex, Notation, PlainText
from clearhead.course.proofs.proof import Proof, ProofLine

_CHECKED = "All {} steps were verified in letters, for any size."


def verification(proof: Proof) -> str:
    """Return a sentence that states how many steps were verified.

    Args:
        proof: The proof.
    """
    return _CHECKED.format(proof.n_steps) if proof.n_steps != 1 else "The step was verified in letters, for any size."


def terminal(proof: Proof, width: int = 80) -> str:
    """Render for the terminal: formulas below each other, reasons in brackets.

    Args:
        proof: The proof.
        width: Number of columns.

    Returns:
        Lines of at most `width` characters, unless a formula has no space at which it can be broken.
    """
    lines = [*_wrap(proof.title, width), "=" * min(len(proof.title), width), "", *_wrap(proof.statement, width)]
    notation = PlainText(proof.symbols)
    for equation, meaning in proof.definitions:
        lines += _wrap(f"{notation.format(equation)}   ({meaning})" if meaning else notation.format(equation), width, 3)
    for part in proof.parts:
        lines += ["", *_wrap(part.heading, width)] if part.heading else [""]
        lines += _wrap(part.text, width)
        if part.claim is not None:
            lines += _wrap(f"Claim: {notation.format(part.claim)}", width, 3)
        for heading, chain in part.chains:
            lines += [f"{heading}:"] if heading else []
            for line in chain:
                lines += _wrap(f"{line.relation or ' '} {notation.format(line.expression)}", width, 3, 5)
                lines += _wrap(f"[{line.reason}]", width, 8, 9) if line.reason else []
    lines += ["", *_wrap(proof.conclusion, width)] if proof.conclusion else []
    return "\n".join([*lines, "", *_wrap(verification(proof), width)]) + "\n"


def _wrap(text: str, width: int, indent: int = 0, hang: int | None = None) -> list[str]:
    later = " " * (indent if hang is None else hang)
    wrapper = textwrap.TextWrapper(width, " " * indent, later, break_on_hyphens=False, break_long_words=False)
    return wrapper.wrap(text)


def markdown(proof: Proof, *, level: int = 1) -> str:
    """Render as Markdown.

    Args:
        proof: The proof.
        level: Level of the heading; 0 leaves out the title.

    Returns:
        Paragraphs, `math` blocks for formulas, and a numbered list of reasons for each chain.
    """
    notation = PlainText(proof.symbols)
    parts = [f"{'#' * level} {proof.title}"] if level else []
    parts.append(proof.statement)
    if proof.definitions:
        parts += ["Definitions:", "\n".join(_definition_item(notation, *pair) for pair in proof.definitions)]
    for part in proof.parts:
        parts += [f"**{part.heading}.**"] if part.heading else []
        parts += [part.text] if part.text else []
        if part.claim is not None:
            parts += [f"Claim: `{notation.format(part.claim)}`"]
        for heading, chain in part.chains:
            parts += [f"{heading}:"] if heading else []
            parts += [_math_block(chain, notation)]
    parts += [proof.conclusion] if proof.conclusion else []
    parts += [f"*{verification(proof)}*"]
    return "\n\n".join(parts) + "\n"


def _definition_item(notation: Notation, equation: ast.expr, meaning: str) -> str:
    return f"- `{notation.format(equation)}`" + (f": {meaning}" if meaning else "")


def _math_block(chain: tuple[ProofLine, ...], notation: Notation) -> str:
    """Return a chain as a `math` block: each formula is followed by its reason in brackets."""
    lines = []
    for line in chain:
        formula = notation.format(line.expression)
        lines.append(f"{line.relation} {formula}" if line.relation else f"  {formula}")
        if line.reason:
            lines += textwrap.wrap(f"[{line.reason}]", 76, initial_indent=" " * 6, subsequent_indent=" " * 7)
    return "\n".join(["```math", *lines, "```"])


def html(proof: Proof) -> str:
    """Return the proof as a self-contained HTML page.

    Args:
        proof: The proof.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(proof.title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"></head>\n'
        f'<body style="max-width: 46rem; margin: 2rem auto; padding: 0 1rem">\n{html_fragment(proof)}\n</body></html>\n'
    )


_STYLE = (
    "font-family: Cambria, Georgia, serif; line-height: 1.6",
    "border-collapse: collapse; margin: .6rem 0",
    "padding: .15rem .6rem .15rem 0; vertical-align: baseline; white-space: nowrap; border: 0; background: none",
    "color: #666; font-size: .9em; padding: .15rem 0 .15rem 1rem; border: 0; background: none",
)


def _prose(text: str) -> str:
    """Format words with mathematics in linear notation, such as p_a and x_{t+1}."""
    tags = {0: "{}", -1: "<sub>{}</sub>", 1: "<sup>{}</sup>"}
    return "".join(tags[run.script].format(escape(run.text)) for run in runs(text))


def html_fragment(proof: Proof) -> str:
    """Render as an HTML fragment: one table per chain, with the reasons in the last column."""
    notation = Html(proof.symbols)
    whole, table, cell, reason = (f'style="{style}"' for style in _STYLE)
    parts = [f"<div {whole}>", f"<h3>{_prose(proof.title)}</h3>", f"<p>{_prose(proof.statement)}</p>"]
    if proof.definitions:
        items = [
            f"<li>{notation.format(equation)}{f': {_prose(text)}' if text else ''}</li>"
            for equation, text in proof.definitions
        ]
        parts.append(f"<ul>{''.join(items)}</ul>")
    for part in proof.parts:
        parts += [f"<h4>{_prose(part.heading)}</h4>"] if part.heading else []
        parts += [f"<p>{_prose(part.text)}</p>"] if part.text else []
        if part.claim is not None:
            parts.append(f"<p>Claim: {notation.format(part.claim)}</p>")
        for heading, chain in part.chains:
            parts += [f"<p>{_prose(heading)}:</p>"] if heading else []
            rows = [
                f"<tr><td {cell}>{line.relation}</td><td {cell}>{notation.format(line.expression)}</td>"
                f"<td {reason}>{_prose(line.reason)}</td></tr>"
                for line in chain
            ]
            parts.append(f"<table {table}>{''.join(rows)}</table>")
    parts += [f"<p>{_prose(proof.conclusion)}</p>"] if proof.conclusion else []
    return "\n".join([*parts, f"<p><em>{verification(proof)}</em></p>", "</div>"])


_MARGINS = r"\usepackage[margin=20mm]{geometry}"
_BESIDE = r"\parbox[t]{0.4\linewidth}"  # reasons are wrapped


def _latex_prose(text: str) -> str:
    """Format words with mathematics in linear notation for LaTeX."""
    parts = []
    for run in runs(text):
        if run.script:
            parts.append(f"${'_' if run.script < 0 else '^'}{{{_latex_symbols(run.text)}}}$")
        else:
            parts.append(f"${run.text}$" if run.is_variable else words(run.text))
    return "".join(parts).replace("$$", " ")


def _latex_symbols(text: str) -> str:
    """Return an index or a power, which is inside of mathematics already."""
    return words(text).replace("$", "")


def latex(proof: Proof) -> str:
    """Return the proof as a LaTeX document with one `align` environment per chain.

    Args:
        proof: The proof.
    """
    notation = Latex(proof.symbols)
    parts = [r"\documentclass{article}", r"\usepackage{amsmath}", _MARGINS, r"\begin{document}"]
    parts += [rf"\section*{{{_latex_prose(proof.title)}}}", _latex_prose(proof.statement)]
    for equation, text in proof.definitions:
        parts.append(rf"\[ {notation.format(equation)} \]" + (f"\n({_latex_prose(text)})" if text else ""))
    for part in proof.parts:
        parts += [rf"\paragraph{{{_latex_prose(part.heading)}}}"] if part.heading else []
        parts += [_latex_prose(part.text)] if part.text else []
        if part.claim is not None:
            parts.append(rf"\[ {notation.format(part.claim)} \]")
        for heading, chain in part.chains:
            parts += [f"{_latex_prose(heading)}:"] if heading else []
            lines = [
                rf"{notation.relations.get(line.relation, '')} & {notation.format(line.expression)}"
                + (rf" && {_BESIDE}{{{_latex_prose(line.reason)}}}" if line.reason else "")
                for line in chain
            ]
            parts.append("\\begin{align*}\n" + " \\\\\n".join(lines) + "\n\\end{align*}")
    parts += [_latex_prose(proof.conclusion)] if proof.conclusion else []
    return "\n\n".join([*parts, words(verification(proof)), r"\end{document}"]) + "\n"


def to_dict(proof: Proof) -> dict[str, object]:
    """Return the proof as JSON-compatible values.

    Args:
        proof: The proof; every formula is given as text, as LaTeX, and in the language of proofs.
    """
    plain, tex = PlainText(proof.symbols), Latex(proof.symbols)

    def formula(tree: ast.expr) -> dict[str, str]:
        return {"expression": ast.unparse(tree), "text": plain.format(tree), "latex": tex.format(tree)}

    def chain(heading: str, lines: tuple[ProofLine, ...]) -> dict[str, object]:
        steps = [{"relation": line.relation, **formula(line.expression), "reason": line.reason} for line in lines]
        return {"heading": heading, "lines": steps}

    return {
        "name": proof.name,
        "title": proof.title,
        "statement": proof.statement,
        "definitions": [{**formula(equation), "meaning": text} for equation, text in proof.definitions],
        "parts": [
            {
                "heading": part.heading,
                "text": part.text,
                "claim": None if part.claim is None else formula(part.claim),
                "chains": [chain(*item) for item in part.chains],
            }
            for part in proof.parts
        ],
        "conclusion": proof.conclusion,
        "verified_steps": proof.n_steps,
    }
