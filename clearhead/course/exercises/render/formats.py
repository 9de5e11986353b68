"""Render a worksheet for the terminal, as Markdown, as HTML and as JSON."""

from __future__ import annotations

import re
import textwrap
from functools import cache, partial
from html import escape
from importlib import resources
from typing import Any

from clearhead._core.json_types import JSONObject
from clearhead.course.exercises.numbers import as_float, text
from clearhead.course.exercises.render.layout import PLAIN, StepBlock, Style, render
from clearhead.course.exercises.sheet import Cell, Worksheet, WorksheetStep

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


# ---------------------------------------------------------------------- for the terminal


def terminal(worksheet: Worksheet, style: Style = PLAIN) -> str:
    """Render as text with aligned columns; decimals are to the right of the exact numbers if they fit, else below."""
    wrap = partial(_wrapped, style.width)

    def step(block: StepBlock) -> list[str]:
        label = "   (given)" if block.step.is_given else ""
        head = wrap(f"{block.step.title}   [{block.step.key}]{label}", bullet=f"{block.number}. ")
        return ["", *head, *wrap(block.step.formula, "   "), *["   " + line for line in _lines(block, style.width - 3)]]

    lines = render(
        worksheet,
        style,
        {
            "title": lambda title: [*wrap(title), "=" * max(map(len, wrap(title)))],
            "source": wrap,
            "question": lambda question: ["", *wrap(question)],
            "step": step,
            "legend": lambda legend: [line for letter, x in legend for line in wrap(f"{letter} = {x}", "   ")],
            "note": lambda note: wrap(note, "   "),
            "section": lambda section: [
                "",
                section[0],
                *[line for sentence in section[1] for line in wrap(sentence, "   ", "-  ")],
            ],
        },
    )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _wrapped(width: int, text: str, indent: str = "", bullet: str = "") -> list[str]:
    """Wrap text to at most `width` columns."""
    later = indent + " " * len(bullet)
    return textwrap.wrap(text, width, initial_indent=indent + bullet, subsequent_indent=later, break_on_hyphens=False)


def _lines(block: StepBlock, width: int) -> list[str]:
    if block.step.grid.is_scalar:
        exact = block.exact[0][0] or "________"
        name = block.step.symbol
        rounded = "" if block.decimals is None else f"≈ {block.decimals[0][0]}"
        line = f"{name} {rounded}" if block.is_decimal_only else f"{name} = {exact} {rounded}".strip()
        if len(line) <= width:
            return [line]
        below = [f"{' ' * len(name)} {rounded}"] if rounded else []
        return [*_wrapped(width, exact, "", f"{name} = ".lstrip()), *below]
    exact_lines = _columns(block, block.exact, width)
    if block.decimals is None:
        return exact_lines
    decimal_lines = _columns(block, block.decimals, width)
    if block.is_decimal_only:
        return ["≈", *decimal_lines]
    if len(exact_lines) == len(decimal_lines) and len(exact_lines[0]) + len(decimal_lines[0]) + 7 <= width:
        return [
            f"{a}{'   ≈   ' if i == 0 else '       '}{b}"
            for i, (a, b) in enumerate(zip(exact_lines, decimal_lines, strict=True))
        ]
    return [*exact_lines, "≈", *decimal_lines]


def _columns(block: StepBlock, cells: list[list[str]], width: int) -> list[str]:
    """Format a matrix with its labels; a wide one is split between columns, with row labels in each part."""
    rows, columns = block.rows, block.columns
    margin = max(map(len, rows))
    widths = [max(len(name), 3, *[len(row[j]) for row in cells]) for j, name in enumerate(columns)]
    between = "  " if margin + sum(widths) + 2 * len(widths) <= width else " "
    parts: list[list[int]] = []
    remaining = -1
    for j, w in enumerate(widths):
        remaining -= len(between) + w
        if remaining < 0:
            parts.append([])
            remaining = width - margin - len(between) - w
        parts[-1].append(j)
    lines: list[str] = []
    for part in parts:
        if any(columns):
            lines.append(" " * margin + "".join(between + columns[j].rjust(widths[j]) for j in part))
        for name, row in zip(rows, cells, strict=True):
            lines.append(name.ljust(margin) + "".join(between + (row[j] or "___").rjust(widths[j]) for j in part))
    return lines


# ---------------------------------------------------------------------- Markdown


def markdown(worksheet: Worksheet, style: Style = PLAIN) -> str:
    """Render as Markdown with headings, tables and lists."""
    parts = render(
        worksheet,
        style,
        {
            "title": lambda title: [f"# {_escape(title)}"],
            "source": lambda source: [_escape(source)],
            "question": lambda question: [_escape(question)],
            "step": _markdown_step,
            "legend": lambda legend: ["\n".join(f"- {letter} = {_escape(value)}" for letter, value in legend)],
            "note": lambda note: [_escape(note)],
            "section": lambda section: [
                f"## {section[0]}",
                "\n".join(f"- {_escape(sentence)}" for sentence in section[1]),
            ],
        },
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def _markdown_step(block: StepBlock) -> list[str]:
    step = block.step
    label = ", given" if step.is_given else ""
    parts = [f"## {block.number}. {_escape(step.title)} (`{step.key}`{label})", step.formula and f"`{step.formula}`"]
    if step.grid.is_scalar:
        rounded = "" if block.decimals is None else f" ≈ {block.decimals[0][0]}"
        exact = "" if block.is_decimal_only else f" = {_escape(block.exact[0][0]) or '…………'}"
        return [*parts, f"{_escape(step.symbol)}{exact}{rounded}".strip()]
    parts += [] if block.is_decimal_only else [_markdown_table(block, block.exact)]
    return parts if block.decimals is None else [*parts, "In decimals:", _markdown_table(block, block.decimals)]


def _markdown_table(block: StepBlock, cells: list[list[str]]) -> str:
    rows = [["", *block.columns], *[[name, *row] for name, row in zip(block.rows, cells, strict=True)]]
    lines = [" | ".join(map(_escape, row)) for row in rows]
    lines.insert(1, " | ".join(["---", *["---:"] * len(block.columns)]))
    return "\n".join(f"| {line} |" for line in lines)


# ---------------------------------------------------------------------- HTML


def html(worksheet: Worksheet, style: Style = PLAIN) -> str:
    """Render as a self-contained HTML page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(worksheet.title)}</title><style>{_styles('page')}</style></head>"
        f"<body>\n{fragment(worksheet, style)}\n</body></html>\n"
    )


def fragment(worksheet: Worksheet, style: Style = PLAIN) -> str:
    """Render as an HTML fragment for notebooks."""
    parts = render(
        worksheet,
        style,
        {
            "title": lambda title: [f'<div class="chw"><style>{_styles("sheet")}</style>', f"<h2>{escape(title)}</h2>"],
            "source": lambda source: [f'<p class="source">{escape(source)}</p>'],
            "question": lambda question: [f'<p class="question">{escape(question)}</p>'],
            "step": _html_step,
            "legend": lambda legend: [_list(f"{letter} = {_format_formula(value)}" for letter, value in legend)],
            "note": lambda note: [f"<p>{escape(note)}</p>"],
            "end": lambda _: ["</section>"],
            "section": lambda section: [f"<section><h3>{section[0]}</h3>{_list(map(escape, section[1]))}</section>"],
        },
    )
    return "\n".join([*parts, "</div>"])


@cache
def _styles(name: str) -> str:
    return (resources.files("clearhead.course.exercises.render") / f"{name}.css").read_text(encoding="utf-8")


def _list(items: Any) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _html_step(block: StepBlock) -> list[str]:
    step = block.step
    key = f"<code>{escape(step.key)}</code>" + (" given" if step.is_given and step.key != "given" else "")
    parts = [
        f'<section class="{"given" if step.is_given else "step"}">',
        f'<h3>{block.number}. {_format_formula(step.title)} <span class="key">{key}</span></h3>',
    ]
    if step.formula:
        parts.append(f'<p class="formula">{_format_formula(step.formula)}</p>')
    if step.grid.is_scalar:
        rounded = "" if block.decimals is None else f" ≈ {escape(block.decimals[0][0])}"
        exact = "" if block.is_decimal_only else f" = {_format_formula(block.exact[0][0] or '______')}"
        return [*parts, f'<p class="one">{_format_formula(step.symbol)}{exact}{rounded}</p>']
    tables = "" if block.is_decimal_only else _html_table(block, block.exact)
    if block.decimals is not None:
        tables += f'<div class="pair"><span class="about">≈</span>{_html_table(block, block.decimals)}</div>'
    return [*parts, f'<div class="pair">{tables}</div>']


def _format_formula(formula: str) -> str:
    """Format a formula as HTML with subscripts (W_Q) and superscripts (e^3, e^(3/2))."""
    low = re.sub(r"(?<=[A-Za-zα-ωℓ)])_(\w+)", r"<sub>\1</sub>", escape(formula))
    return re.sub(r"\^(?:\(([^()]*)\)|(\w+))", lambda comparison: f"<sup>{comparison[1] or comparison[2]}</sup>", low)


def _html_table(block: StepBlock, cells: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{_format_formula(name)}</th>' for name in block.columns)
    rows = "".join(
        f'<tr><th scope="row">{_format_formula(name)}</th>'
        + "".join(f"<td>{_format_formula(cell)}</td>" for cell in row)
        + "</tr>"
        for name, row in zip(block.rows, cells, strict=True)
    )
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>"


# ---------------------------------------------------------------------- JSON


def to_dict(worksheet: Worksheet, style: Style = PLAIN) -> dict[str, object]:
    """Return the worksheet as JSON-compatible values: exact text, which can be graded again, and floats.

    With `questions_only`, answers are empty strings.
    """
    document: JSONObject = _attributes(worksheet, "name", "kind", "title", "source", "question")
    document["steps"] = [_step(step, style.questions_only and not step.is_given) for step in worksheet.steps]
    if style.questions_only:
        return document
    return document | {
        "remarks": list(worksheet.remarks),
        "document": [
            _attributes(comparison, "step", "agrees") | {"says": list(comparison.sentences)}
            for comparison in worksheet.comparisons
        ],
        "float64": [_attributes(check, "by", "difference", "limit", "agrees") for check in worksheet.checks],
        "agrees": worksheet.agrees,
    }


def _attributes(of: object, *names: str) -> dict[str, object]:
    return {name: getattr(of, name) for name in names}


def _step(step: WorksheetStep, hide: bool) -> JSONObject:
    cells = step.grid.cells
    document = _attributes(step, "key", "title", "symbol", "formula", "latex") | {"given": step.is_given}
    document |= {"rows": list(step.grid.rows), "columns": list(step.grid.columns)}
    document["exact"] = [["" if hide else x if isinstance(x, str) else text(x) for x in row] for row in cells]
    if not hide:
        document |= {"decimal": [[_float(x) for x in row] for row in cells], "note": step.note}
    return document


def _float(x: Cell) -> float | str | None:
    """Return a float, or None for infinity and formulas, which JSON numbers cannot express."""
    if isinstance(x, str):
        return x
    return None if x.is_infinite or x.free_symbols else as_float(x)
