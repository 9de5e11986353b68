"""A sheet as HTML: one self-contained page, or the fragment that a notebook shows."""

from __future__ import annotations

from html import escape

from clearhead.work.sheet import Work
from clearhead.work.show.layout import Block, Style, blocks, closing, is_plain

_CSS = (
    ".chw{font-family:system-ui,sans-serif;line-height:1.45;max-width:70rem}"
    ".chw h2{font-size:1.3em}.chw h3{font-size:1.05em;margin:1.4em 0 .3em}"
    ".chw .pair{display:flex;flex-wrap:wrap;gap:1.5rem;align-items:center;overflow-x:auto}"
    ".chw table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    ".chw th,.chw td{padding:.15rem .55rem;text-align:right;border:1px solid #8884;min-width:1.6em;height:1.5em}"
    ".chw th{font-weight:600;background:#8881}.chw tbody th{text-align:left}"
    ".chw .key{font-weight:400;opacity:.7}.chw .one{font-size:1.1em}"
)


def html(work: Work, style: Style | None = None) -> str:
    """The sheet as a page that needs nothing else."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(work.title)}</title></head><body>\n{fragment(work, style)}\n</body></html>\n"
    )


def fragment(work: Work, style: Style | None = None) -> str:
    """The sheet without the page around it."""
    style = style or Style()
    parts = [f'<div class="chw"><style>{_CSS}</style>', f"<h2>{escape(work.title)}</h2>"]
    if work.source:
        parts.append(f"<p>From: {escape(work.source)}</p>")
    if work.question:
        parts.append(f"<p>{escape(' '.join(work.question.split()))}</p>")
    for block in blocks(work, style):
        step = block.step
        key = f"<code>{escape(step.key)}</code>" + (" given" if step.given else "")
        parts.append(f'<h3>{block.number}. {escape(step.title)} <span class="key">{key}</span></h3>')
        if step.formula:
            parts.append(f"<p><code>{escape(step.formula)}</code></p>")
        parts.append(_body(block))
        if block.legend:
            items = "".join(f"<li>{letter} = {escape(value)}</li>" for letter, value in block.legend)
            parts.append(f"<ul>{items}</ul>")
        if block.note:
            parts.append(f"<p>{escape(block.note)}</p>")
    for heading, sentences in closing(work, style):
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        parts.append(f"<h3>{heading}</h3><ul>{items}</ul>")
    return "\n".join([*parts, "</div>"])


def _body(block: Block) -> str:
    if is_plain(block.step.grid):
        exact = block.exact[0][0] or "______"
        rounded = "" if block.decimals is None else f" ≈ {escape(block.decimals[0][0])}"
        return f'<p class="one">{escape(block.step.symbol)} = {escape(exact)}{rounded}</p>'
    tables = _table(block, block.exact)
    if block.decimals is not None:
        tables += f"<span>≈</span>{_table(block, block.decimals)}"
    return f'<div class="pair">{tables}</div>'


def _table(block: Block, cells: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in block.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for name, row in zip(block.rows, cells, strict=True)
    )
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>"
