"""A sheet as HTML: one self-contained page, or the fragment that a notebook shows."""

from __future__ import annotations

import re
from html import escape

from clearhead.work.sheet import Work
from clearhead.work.show.layout import Block, Style, blocks, closing, is_plain

# Colours are mixed from the text's own, so that a sheet fits a light or dark page and a notebook of either kind.
# A matrix stands between brackets, with the names of its rows and columns outside them, as on paper.
# Notebooks stripe the rows of a table and rule off its head, by rules of two classes: `.chw.chw` has the last word.
_CSS = """
.chw { line-height: 1.5; max-width: 78rem; font-family: system-ui, -apple-system, "Segoe UI", sans-serif;
  --line: color-mix(in srgb, currentColor 22%, transparent);
  --soft: color-mix(in srgb, currentColor 62%, transparent); }
.chw h2 { font: 400 1.7em/1.25 "Iowan Old Style", Charter, Georgia, "Liberation Serif", serif; margin: 0 0 .4em; }
.chw h3 { font-size: 1em; font-weight: 600; margin: 0 0 .5em; }
.chw p { margin: 0 0 .6em; }
.chw .source { color: var(--soft); font-size: .9em; }
.chw .question { font-size: 1.05em; padding-bottom: 1.2em; border-bottom: 1px solid var(--line); }
.chw section { margin: 1.6em 0; }
/* Steps stand beside each other where they have room, in the order of reading. */
.chw section:is(.given, .step) { display: inline-block; vertical-align: top; margin: 1.1em 2.6em .3em 0;
  max-width: 100%; }
.chw .step :is(p, ul) { max-width: 34em; }
.chw .key { font-weight: 400; color: var(--soft); font-size: .85em; margin-left: .5em; }
.chw code { font-family: ui-monospace, Menlo, Consolas, "Liberation Mono", monospace; font-size: .92em; }
.chw .formula { color: var(--soft); }
.chw .pair { display: flex; flex-wrap: wrap; gap: .8em 1.4em; align-items: center; overflow-x: auto; }
.chw .about { color: var(--soft); font-size: 1.2em; }
.chw.chw table { border-collapse: collapse; font-variant-numeric: tabular-nums; background: none; }
.chw.chw :is(thead, tbody, tr, tr:nth-child(n), tr:hover) { background: none; border: 0; }
.chw.chw table { table-layout: auto; margin: 0; width: auto; box-shadow: none; border: 0; display: table; }
.chw.chw th, .chw.chw td { padding: .16em .7em; text-align: right; min-width: 1.6em; height: 1.6em;
  border: 0; background: none; }
.chw.chw th { font-weight: 400; font-size: .85em; color: var(--soft); }
.chw.chw tbody th { text-align: right; padding-left: 0; }
.chw.chw tbody td:nth-child(2) { border-left: 1.5px solid currentColor; }
.chw.chw tbody td:last-child { border-right: 1.5px solid currentColor; }
.chw.chw tbody tr:is(:first-child, :last-child) td:is(:nth-child(2), :last-child) {
  background: linear-gradient(currentColor, currentColor) no-repeat,
    linear-gradient(currentColor, currentColor) no-repeat;
  background-size: .45em 1.5px; }
.chw.chw tbody tr:first-child td:nth-child(2) { background-position: left top; }
.chw.chw tbody tr:last-child td:nth-child(2) { background-position: left bottom; }
.chw.chw tbody tr:first-child td:last-child { background-position: right top; }
.chw.chw tbody tr:last-child td:last-child { background-position: right bottom; }
.chw.chw tbody tr:first-child td:nth-child(2):last-child { background-position: left top, right top; }
.chw.chw tbody tr:last-child td:nth-child(2):last-child { background-position: left bottom, right bottom; }
.chw.chw tbody tr:only-child td:nth-child(2) { background-position: left top, left bottom; }
.chw.chw tbody tr:only-child td:last-child { background-position: right top, right bottom; }
.chw.chw tbody tr:only-child td:nth-child(2):last-child { background: none; border: 0; text-align: left; }
.chw.chw tbody td:empty { box-shadow: inset 0 0 0 1px var(--line); min-width: 3.2em; height: 2em; }
.chw .one { font-size: 1.15em; }
.chw ul { margin: .3em 0; padding-left: 1.3em; }
.chw li { margin: .15em 0; }
@media print { .chw { font-size: 9pt; max-width: none; } .chw section { break-inside: avoid; } }
"""
_PAGE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 78rem; padding: 3rem clamp(1rem, 4vw, 3rem) 5rem;
  background: #fbfaf7; color: #1c2127; }
@media (prefers-color-scheme: dark) { body { background: #14171b; color: #e8e6e1; } }
@media print { body { padding: 0; background: none; color: #000; } }
"""


def html(work: Work, style: Style | None = None) -> str:
    """The sheet as a page that needs nothing else."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(work.title)}</title><style>{_PAGE}</style></head>"
        f"<body>\n{fragment(work, style)}\n</body></html>\n"
    )


def fragment(work: Work, style: Style | None = None) -> str:
    """The sheet without the page around it."""
    style = style or Style()
    parts = [f'<div class="chw"><style>{_CSS}</style>', f"<h2>{escape(work.title)}</h2>"]
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


def _body(block: Block) -> str:
    if is_plain(block.step.grid):
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
