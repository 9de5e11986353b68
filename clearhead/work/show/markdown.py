"""A sheet as Markdown: headings, tables and lists that every renderer knows."""

from __future__ import annotations

import re

from clearhead.work.sheet import Work
from clearhead.work.show.layout import Block, Style, blocks, closing

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


def markdown(work: Work, style: Style | None = None) -> str:
    """The sheet as a Markdown document."""
    style = style or Style()
    parts = [f"# {_escape(work.title)}"]
    if work.source:
        parts.append(f"From: {_escape(work.source)}")
    if work.question:
        parts.append(_escape(" ".join(work.question.split())))
    for block in blocks(work, style):
        step = block.step
        given = ", given" if step.given else ""
        parts.append(f"## {block.number}. {_escape(step.title)} (`{step.key}`{given})")
        if step.formula:
            parts.append(f"`{step.formula}`")
        parts += _body(block)
        if block.legend:
            parts.append("\n".join(f"- {letter} = {_escape(value)}" for letter, value in block.legend))
        if block.note:
            parts.append(_escape(block.note))
    for heading, sentences in closing(work, style):
        parts.append(f"## {heading}")
        parts.append("\n".join(f"- {_escape(sentence)}" for sentence in sentences))
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def _body(block: Block) -> list[str]:
    if block.step.grid.is_one:
        exact = _escape(block.exact[0][0])
        rounded = "" if block.decimals is None else f" ≈ {block.decimals[0][0]}"
        return [f"{_escape(block.step.symbol)} = {exact or '…………'}{rounded}".strip()]
    tables = [_table(block.rows, block.columns, block.exact)]
    if block.decimals is not None:
        tables += ["In decimals:", _table(block.rows, block.columns, block.decimals)]
    return tables


def _table(rows: tuple[str, ...], columns: tuple[str, ...], cells: list[list[str]]) -> str:
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    escaped = [" | ".join(_escape(x) for x in lines[0]), " | ".join(lines[1])]
    escaped += [" | ".join(_escape(x) for x in (name, *row)) for name, row in zip(rows, cells, strict=True)]
    return "\n".join(f"| {line} |" for line in escaped)
