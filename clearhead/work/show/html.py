"""A sheet as HTML: one self-contained page, or the fragment that a notebook shows."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib import resources

from clearhead.work.sheet import Work
from clearhead.work.show.layout import Block, Style, blocks, closing


def html(work: Work, style: Style | None = None) -> str:
    """The sheet as a page that needs nothing else."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(work.title)}</title><style>{_styles('page')}</style></head>"
        f"<body>\n{fragment(work, style)}\n</body></html>\n"
    )


def fragment(work: Work, style: Style | None = None) -> str:
    """The sheet without the page around it."""
    style = style or Style()
    parts = [f'<div class="chw"><style>{_styles("sheet")}</style>', f"<h2>{escape(work.title)}</h2>"]
    if work.source:
        parts.append(f'<p class="source">From: {escape(work.source)}</p>')
    if work.question:
        parts.append(f'<p class="question">{escape(" ".join(work.question.split()))}</p>')
    for block in blocks(work, style):
        step = block.step
        key = f"<code>{escape(step.key)}</code>" + (" given" if step.given and step.key != "given" else "")
        parts.append(f'<section class="{"given" if step.given else "step"}">')
        parts.append(f'<h3>{block.number}. {_set(step.title)} <span class="key">{key}</span></h3>')
        if step.formula:
            parts.append(f'<p class="formula">{_set(step.formula)}</p>')
        parts.append(_body(block))
        if block.legend:
            items = "".join(f"<li>{letter} = {_set(value)}</li>" for letter, value in block.legend)
            parts.append(f"<ul>{items}</ul>")
        if block.note:
            parts.append(f"<p>{escape(block.note)}</p>")
        parts.append("</section>")
    for heading, sentences in closing(work, style):
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        parts.append(f"<section><h3>{heading}</h3><ul>{items}</ul></section>")
    return "\n".join([*parts, "</div>"])


@cache
def _styles(name: str) -> str:
    return (resources.files("clearhead.work.show") / f"{name}.css").read_text(encoding="utf-8")


def _body(block: Block) -> str:
    if block.step.grid.is_one:
        exact = block.exact[0][0] or "______"
        rounded = "" if block.decimals is None else f" ≈ {escape(block.decimals[0][0])}"
        return f'<p class="one">{_set(block.step.symbol)} = {_set(exact)}{rounded}</p>'
    tables = _table(block, block.exact)
    if block.decimals is not None:
        tables += f'<div class="pair"><span class="about">≈</span>{_table(block, block.decimals)}</div>'
    return f'<div class="pair">{tables}</div>'


def _set(formula: str) -> str:
    """A formula as it is printed: W_Q with its index lowered, e^3 and e^(3/2) with their powers raised."""
    low = re.sub(r"(?<=[A-Za-zα-ωℓ)])_(\w+)", r"<sub>\1</sub>", escape(formula))
    return re.sub(r"\^(?:\(([^()]*)\)|(\w+))", lambda found: f"<sup>{found[1] or found[2]}</sup>", low)


def _table(block: Block, cells: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in block.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{_set(cell)}</td>" for cell in row) + "</tr>"
        for name, row in zip(block.rows, cells, strict=True)
    )
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>"
