"""The ledger as one HTML page that can be read without a network: a study guide, document by document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from clearhead.claims.ledger import DOES_NOT_HOLD, HOLDS, HOLDS_WHEN, Outcome
from clearhead.claims.sources import DOCUMENTS

_CLASS = {HOLDS: "yes", HOLDS_WHEN: "when", DOES_NOT_HOLD: "no"}
_LABEL = {HOLDS: "holds", HOLDS_WHEN: "holds when …", DOES_NOT_HOLD: "does not hold as printed"}

_STYLE = """
* { box-sizing: border-box; }
body { font: 16px/1.55 Georgia, "Times New Roman", serif; color: #1d1d1f; background: #fbfaf8; margin: 0; }
main { max-width: 56rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 2rem; margin: 0 0 .25rem; }
h2 { margin: 3rem 0 .75rem; border-bottom: 2px solid #ddd6cb; padding-bottom: .3rem; }
h3 { font-size: 1.08rem; margin: 0; line-height: 1.4; }
p { margin: .5rem 0; }
.place, .method, .small, summary { color: #5d5a55; font-size: .88rem; }
article { background: #fff; border: 1px solid #e6e0d6; border-left: 6px solid #888; border-radius: 4px;
  padding: 1rem 1.2rem; margin: 1rem 0; break-inside: avoid; }
article.yes { border-left-color: #2f7d4f; }
article.when { border-left-color: #b7791f; }
article.no { border-left-color: #b42318; }
.verdict { display: inline-block; font: 600 .8rem/1 system-ui, sans-serif; padding: .3rem .55rem;
  border-radius: 3px; color: #fff; }
.yes .verdict, .verdict.yes { background: #2f7d4f; }
.when .verdict, .verdict.when { background: #96600f; }
.no .verdict, .verdict.no { background: #b42318; }
.key { background: #f7f3ec; padding: .6rem .8rem; border-radius: 3px; margin: .7rem 0; overflow-wrap: anywhere; }
.key b { font-family: system-ui, sans-serif; font-size: .85rem; }
ul.evidence { font: .84rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; margin: .6rem 0; padding-left: 0;
  list-style: none; overflow-wrap: anywhere; }
figure { margin: .8rem 0 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
td, th { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid #e6e0d6;
  overflow-wrap: anywhere; }
td.n, th.n { text-align: right; overflow-wrap: normal; }
a { color: #1f4e8c; }
code { font-size: .85rem; }
summary { cursor: pointer; }
@media print { body { background: #fff; } }
"""


def report(outcomes: Sequence[Outcome], seed: int = 0) -> str:
    """The page. Everything it shows is inside it: style, drawings, numbers."""
    by_source = {d: [o for o in outcomes if o.claim.source == d] for d in DOCUMENTS}
    by_source = {d: found for d, found in by_source.items() if found}
    wrong = [o for o in outcomes if o.verdict == DOES_NOT_HOLD]
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>The ledger of claims</title><style>{_STYLE}</style></head><body><main>",
        "<h1>The ledger of claims</h1>",
        f"<p>{len(outcomes)} statements about attention, Transformers and their neighbours, taken "
        "from five courses and exams and "
        "each tried by a program. The program decides: by exact arithmetic where that is possible, "
        "by an experiment with a stated "
        f"accuracy where it is not. Seed {seed}.</p>",
        _how_to_read(),
        _overview(by_source),
    ]
    if wrong:
        rows = "".join(
            f'<tr><td><a href="#{o.claim.id}">{escape(o.claim.says)}</a></td>'
            f"<td>{escape(o.counter_example)}</td></tr>"
            for o in wrong
        )
        parts.append(
            "<h2>What does not hold as "
            "printed</h2><table><thead><tr><th>statement</th><th>counter-example</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    for i, (source, found) in enumerate(by_source.items()):
        parts.append(f'<h2 id="document-{i}">{escape(source)}</h2>')
        parts += [_entry(o) for o in found]
    parts.append("</main></body></html>\n")
    return "\n".join(parts)


def _how_to_read() -> str:
    return (
        '<p class="small"><span class="verdict yes">holds</span> every case that was tried agrees. '
        '<span class="verdict when">holds when …</span> it is right under the condition given, with an example on '
        "each side. "
        '<span class="verdict no">does not hold as printed</span> there is a counter-example; the correct statement '
        "follows and was tried as well. In the evidence ✓ is a case in which the statement is right, ✗ one in which "
        "it is not.</p>"
    )


def _overview(by_source: dict[str, list[Outcome]]) -> str:
    rows = []
    for i, (source, found) in enumerate(by_source.items()):
        count = Counter(o.verdict for o in found)
        cells = "".join(f'<td class="n">{count[v]}</td>' for v in _CLASS)
        rows.append(
            f'<tr><td><a href="#document-{i}">{escape(source)}</a></td><td class="n">{len(found)}</td>{cells}</tr>'
        )
    total = Counter(o.verdict for found in by_source.values() for o in found)
    cells = "".join(f'<td class="n"><b>{total[v]}</b></td>' for v in _CLASS)
    head = "".join(f'<th class="n">{_LABEL[v]}</th>' for v in _CLASS)
    return (
        f'<table><thead><tr><th>document</th><th class="n">statements</th>{head}</tr></thead><tbody>{"".join(rows)}'
        f'<tr><td><b>all</b></td><td class="n"><b>{sum(total.values())}</b></td>{cells}</tr></tbody></table>'
    )


def _with_code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _entry(o: Outcome) -> str:
    c = o.claim
    key = ""
    if o.verdict == HOLDS_WHEN:
        key = (
            f'<div class="key"><b>Condition</b> {escape(c.when)}.<br><b>With it</b> {escape(o.example_for)}<br>'
            f"<b>Without it</b> {escape(o.example_against)}</div>"
        )
    if o.verdict == DOES_NOT_HOLD:
        key = (
            f'<div class="key"><b>Counter-example</b> {escape(o.counter_example)}<br>'
            f"<b>Correct</b> {escape(o.correct)}</div>"
        )
    evidence = "".join(f"<li>{escape(e)}</li>" for e in o.evidence)
    figure = f"<figure>{o.figure.svg()}</figure>" if o.figure else ""
    return (
        f'<article class="{_CLASS[o.verdict]}" id="{c.id}"><h3>{escape(c.says)}</h3>'
        f'<p><span class="verdict">{_LABEL[o.verdict]}</span> '
        f'<span class="place">{escape(c.place)} · <code>{c.id}</code></span></p>'
        f'{key}<p class="method">How it was tried: {_with_code(c.method)}</p>'
        f'<details open><summary>Evidence</summary><ul class="evidence">{evidence}</ul></details>{figure}</article>'
    )
