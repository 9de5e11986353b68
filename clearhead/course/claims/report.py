"""Render all claims as one self-contained HTML page, ordered by course document.

It has a search box and a dark mode, a table of contents, a summary of what does not hold, and each statement with its
verdict, the method, the evidence and a figure. "Questions only" hides the answers, so that a class can decide first; it
works on paper, too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib import resources
from itertools import groupby
from string import Template

from clearhead.course.claims.registry import (
    DOCUMENTS,
    DOES_NOT_HOLD,
    HOLDS,
    HOLDS_CONDITIONALLY,
    MISPRINT,
    THEMES,
    Outcome,
)

_CLASS = {HOLDS: "holds", HOLDS_CONDITIONALLY: "conditional", DOES_NOT_HOLD: "fails", MISPRINT: "misprint"}
_LABEL = {
    HOLDS: "holds",
    HOLDS_CONDITIONALLY: "holds conditionally",
    DOES_NOT_HOLD: "does not hold as printed",
    MISPRINT: "misprint",
}
_MARK = {HOLDS: "✓", HOLDS_CONDITIONALLY: "?", DOES_NOT_HOLD: "✗", MISPRINT: "≠"}
_MEANS = {
    HOLDS: "every case that was tried agrees with it",
    HOLDS_CONDITIONALLY: "it is right under the condition that is given, with an example on each side of it",
    DOES_NOT_HOLD: "there is a counter-example, the smallest that was found; what to say instead was tried as well",
    MISPRINT: "only the typography is at fault (such as an index or a sign); the intended statement was tested",
}


def report(outcomes: Sequence[Outcome], seed: int = 0) -> str:
    """Return the HTML page, which contains its styles and figures.

    Args:
        outcomes: Outcomes of the tested claims.
        seed: The seed that they were tested with.
    """
    documents = [
        (d, items_of_source) for d in DOCUMENTS if (items_of_source := [o for o in outcomes if o.claim.source == d])
    ]
    numbers = {
        o.claim.id: f"{i}.{j}"
        for i, (_, items_of_source) in enumerate(documents, 1)
        for j, o in enumerate(items_of_source, 1)
    }
    folder = resources.files("clearhead.course.claims")
    page, style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    legend = "".join(f'<span class="verdict {_CLASS[v]}">{_LABEL[v]}</span><span>{_MEANS[v]}.</span>' for v in _CLASS)
    boxes = "".join(f'<label><input type="checkbox" id="show-{_CLASS[v]}" checked> {_LABEL[v]}</label>' for v in _CLASS)
    n = len(documents)
    courses = "one course or exam" if n == 1 else f"{('no', '', 'two', 'three', 'four', 'five')[n]} courses and exams"
    about = {"n_claims": len(outcomes), "courses": courses, "seed": seed}
    wrong = _wrong([o for o in outcomes if o.verdict in (DOES_NOT_HOLD, MISPRINT)], numbers)
    parts = []
    for i, (source, items_of_source) in enumerate(documents, 1):
        parts.append(f'<h2 id="document-{i}">{i}. {escape(source)}</h2>')
        for theme, entries in groupby(items_of_source, key=lambda o: o.claim.theme):
            parts.append(f'<h3 id="document-{i}-{theme}">{escape(THEMES[theme])}</h3>')
            parts += [_entry(o, numbers[o.claim.id]) for o in entries]
        parts.append('<p class="top"><a href="#top">Back to the contents</a></p>')
    result_text = {"legend": legend, "boxes": boxes, "contents": _contents(documents), "wrong": wrong}
    return Template(page).substitute(about | result_text, style=style, script=script, entries="\n".join(parts))


def _contents(documents: Sequence[tuple[str, Sequence[Outcome]]]) -> str:
    rows, items = [], []
    for i, (source, items_of_source) in enumerate(documents, 1):
        count = Counter(o.verdict for o in items_of_source)
        cells = "".join(f'<td class="n">{count[v]}</td>' for v in _CLASS)
        link = f'<a href="#document-{i}">{i}. {escape(source)}</a>'
        rows.append(f'<tr><td>{link}</td><td class="n">{len(items_of_source)}</td>{cells}</tr>')
        names = dict.fromkeys(o.claim.theme for o in items_of_source)
        themes = "".join(f'<li><a href="#document-{i}-{name}">{escape(THEMES[name])}</a></li>' for name in names)
        strip = "".join(
            f'<a class="{_CLASS[o.verdict]}" href="#{o.claim.id}" '
            f'title="{escape(o.claim.statement)}">{_MARK[o.verdict]}</a>'
            for o in items_of_source
        )
        items.append(f'<li>{link}<ul class="themes">{themes}</ul><div class="strip answers">{strip}</div></li>')
    total = Counter(o.verdict for _, items_of_source in documents for o in items_of_source)
    cells = "".join(f'<td class="n"><b>{total[v]}</b></td>' for v in _CLASS)
    head = "".join(f'<th class="n">{_LABEL[v]}</th>' for v in _CLASS)
    return (
        '<div class="wide"><table class="summary"><thead>'
        f'<tr><th>document</th><th class="n">statements</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}<tr><td><b>all</b></td>"
        f'<td class="n"><b>{sum(total.values())}</b></td>{cells}</tr></tbody>'
        f'</table></div><h2>Contents</h2><ul class="contents">{"".join(items)}</ul>'
    )


def _wrong(outcomes: Sequence[Outcome], numbers: dict[str, str]) -> str:
    if not outcomes:
        return ""
    wrong = {o.claim.id: o for o in outcomes}
    rows = "".join(
        f'<tr><td class="n">{number}</td><td><a href="#{id}">{typeset(wrong[id].claim.statement)}</a></td>'
        f"<td>{typeset(wrong[id].counter_example)}</td><td>{typeset(wrong[id].correction)}</td></tr>"
        for id, number in numbers.items()
        if id in wrong
    )
    head = "<th></th><th>statement</th><th>counter-example</th><th>say instead</th>"
    return (
        '<div class="answers"><h2 id="wrong">Statements that do not hold as printed</h2>'
        f'<table class="summary wrong"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _key(o: Outcome) -> str:
    """Return an HTML element with the deciding cases."""
    if o.verdict == HOLDS_CONDITIONALLY:
        rows = [("Holds when", f"{o.claim.condition}."), ("With it", o.example_for), ("Without it", o.example_against)]
    elif o.correction:
        rows = [("Counter-example", o.counter_example)]
        rows.append(("Meant" if o.verdict == MISPRINT else "Say instead", o.correction))
    else:
        return ""
    right = ("Holds when", "Say instead", "Meant")
    body = "".join(f"<dt>{x}</dt><dd{' class=right' * (x in right)}>{typeset(text)}</dd>" for x, text in rows)
    return f'<dl class="key answer">{body}</dl>'


def _entry(o: Outcome, number: str) -> str:
    c = o.claim
    evidence = "".join(
        f'<tr class="{"ok" if case.passed else "not"}"><td>{"✓" if case.passed else "✗"}</td>'
        f"<td>{typeset(case.description)}</td><td>{typeset(case.result)}</td></tr>"
        for case in o.cases
    )
    items = "".join(f"<li>{typeset(note)}</li>" for note in o.notes)
    notes = f'<ul class="notes answer">{items}</ul>' if items else ""
    remark = "" if c.is_asserted else " (asked, not asserted)"
    figure = f'<figure class="answer">{o.figure.svg()}</figure>' if o.figure else ""
    return (
        f'<article class="{_CLASS[o.verdict]}" id="{c.id}" tabindex="-1"><span class="number">{number}</span>'
        f"<h4>{typeset(c.statement)}</h4>"
        f'<p class="meta"><span class="verdict answer">{_LABEL[o.verdict]}</span> '
        f"{escape(c.location)}{remark} · <code>{c.id}</code></p>"
        f'{_key(o)}<p class="method answer"><b>How it was tried.</b> {typeset(c.method)}</p>'
        f'<table class="evidence answer"><tbody>{evidence}</tbody></table>{notes}{figure}</article>'
    )


# ---------------------------------------------------------------------- sentences with mathematics in them, as HTML
#
# Claims are written for a terminal first (`W_O`, `10000^(2i/d)`, `[1 0; 1/2 1/2]`): here indices, powers, minus signs,
# italic variables and matrices are set as such. The wording is unchanged.

_MATRIX = re.compile(r"\[([^\[\];]+(?:;[^\[\];]+)+)\]|\[(\[[^\[\]]+\](?:, \[[^\[\]]+\])+)\]")
_CODE = re.compile(r"`([^`]+)`")
_POWER_OF_TEN = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)[eE]([+-]?)0*(\d+)\b")
_INDEX = re.compile(r"(?<![A-Za-z])([A-Za-zΣ]|lr)_(\{[^{}]+\}|[A-Za-z]+|\d+)")
_POWER = re.compile(r"\^(\([^()]*\)|\{[^{}]*\}|[A-Za-z0-9]+)")
_MINUS = re.compile(r"(?<![\w)\]²³′])-(?=\d|\w\b|√|<i>)")
# A single letter is a variable. "a", "A" and "I" are also words, unless next to mathematics; A to D
# are tokens.
_VARIABLE = re.compile(r"(?<![A-Za-z_&;'’])([b-zE-HJ-Z]|[A-Za-z]{2}(?=[²³ᵀ]))(?![A-Za-z_'’])")
_VARIABLE_OR_WORD = re.compile(r"(?<![A-Za-z_&;'’])([aAI])(?=\s?[=·²³/|)⊙]|[(ᵀ′]|<su)")
_SUPERSCRIPTS = str.maketrans("0123456789+-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻")


def typeset(text: str) -> str:
    """Return text as HTML with typeset mathematics; `code` in backticks is unchanged."""
    parts = _CODE.split(text)
    return "".join(f"<code>{escape(part)}</code>" if i % 2 else _prose(part) for i, part in enumerate(parts))


def _prose(text: str) -> str:
    pieces = []
    end = 0
    for match in _MATRIX.finditer(text):
        # [1, 0], [0, 1] is the same as 1 0; 0 1
        body = match[1] or match[2][1:-1].replace("], [", ";").replace(",", " ")
        pieces += [_line(text[end : match.start()]), _matrix(body)]
        end = match.end()
    return "".join([*pieces, _line(text[end:])])


def _matrix(body: str) -> str:
    rows = (row.split() for row in body.split(";"))
    cells = "".join("<tr>" + "".join(f"<td>{_line(x)}</td>" for x in row) + "</tr>" for row in rows)
    return f'<span class="matrix"><table>{cells}</table></span>'


def _line(text: str) -> str:
    text = escape(text, quote=False)
    text = _POWER_OF_TEN.sub(_power_of_ten, text)
    text = _INDEX.sub(lambda match: f"{match[1]}<sub>{_bare(match[2])}</sub>", text)
    text = _POWER.sub(lambda match: f"<sup>{_bare(match[1])}</sup>", text)
    text = _VARIABLE.sub(r"<i>\1</i>", text)  # no tag so far is a single letter
    text = _VARIABLE_OR_WORD.sub(r"<i>\1</i>", text)
    return _MINUS.sub("−", text)


def _power_of_ten(match: re.Match[str]) -> str:
    """Format 4.53e-04 as 4.53 · 10⁻⁴."""
    digits, sign, power = match.groups()
    if power == "0" or float(digits) == 0:
        return f"{float(digits):g}"
    sign = "-" if sign == "-" else ""
    return f"{digits}·10{(sign + power).translate(_SUPERSCRIPTS)}"


def _bare(text: str) -> str:
    """Remove outer brackets."""
    return text[1:-1] if text[0] in "({" else text
