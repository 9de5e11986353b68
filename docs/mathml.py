"""Render equations as MathML, which browsers typeset without scripts, fonts or network requests."""

from __future__ import annotations

import re
import unicodedata
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

# Commands that docutils' LaTeX parser does not support, and their replacements.
ALIASES = {r"\dots": r"\ldots", r"\mathrm{E}": r"\operatorname{E}", r"\!": ""}

# Names of functions, such as "log V", are followed by a thin space, except before a bracket, and preceded by one.
SPACE = '<mspace width="0.1667em"></mspace>'
APPLIED = re.compile(r"(<mo>&ApplyFunction;</mo>)(?!\s*(?:<mrow>\s*)?<mo[^>]*>[(\[])")
PRECEDED = re.compile(r"(</(?:mi|mn|msub|msup|msubsup|mfrac)>|\)</mo>)(?=\s*<mi[^>]*>\w\w+</mi>\s*<mo>&ApplyFunction;)")

# The label of an underbrace, which the parser renders as a subscript, is below the brace.
LABELED = re.compile(
    r"<msub>(\s*<munder>(?:(?!</munder>).)*<mo>⏟</mo>\s*</munder>\s*<mtext>[^<]*</mtext>\s*)</msub>", re.DOTALL
)

# Characters that must not be separated from an adjacent inline equation by a line break.
CLOSING = re.compile(r"[.,;:!?)\]’”]+")
OPENING = re.compile(r"[(\[‘“]$")


def _bold(match: re.Match[str]) -> str:
    """Return a bold Greek letter; the parser renders `\\boldsymbol` as plain, and ignores where its argument ends."""
    return unicodedata.lookup(f"MATHEMATICAL BOLD SMALL {match[1].upper()}")


def mathml(tex: str, *, block: bool) -> str:
    """Convert an equation from LaTeX to MathML; raise MathError if it cannot be parsed."""
    for command, replacement in ALIASES.items():
        tex = tex.replace(command, replacement)
    tex = re.sub(r"\\boldsymbol\{\\(\w+)\}", _bold, tex)
    markup: str = latex2mathml.tex2mathml(tex, as_block=block)
    markup = LABELED.sub(r"<munder>\1</munder>", markup)
    markup = PRECEDED.sub(rf"\1{SPACE}", APPLIED.sub(rf"\1{SPACE}", markup))
    return re.sub(r'<mo( class="\w+")?>‖</mo>', r'<mo\1 stretchy="false">‖</mo>', markup)  # norms of one height


def _markup(node: Any, *, block: bool) -> str:
    """Return the MathML of a node, or its source as code, with a warning, if it cannot be parsed."""
    try:
        return mathml(node.astext(), block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("cannot parse the equation %r: %s", node.astext(), error, location=node)
        return f"<code>{escape(node.astext())}</code>"


def _inline(translator: Any, node: nodes.math) -> None:
    markup = f"{node.get('before', '')}{_markup(node, block=False)}{node.get('after', '')}"
    translator.body.append(f'<span class="equation">{markup}</span>')
    raise nodes.SkipNode


def _display(translator: Any, node: nodes.math_block) -> None:
    ids = node.get("ids") or []
    id_attribute = f' id="{escape(ids[0])}"' if ids else ""
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    translator.body.append(f'<div class="math"{id_attribute}>{_markup(node, block=True)}{number}</div>\n')
    raise nodes.SkipNode


def _attach_punctuation(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Move punctuation next to an inline equation into its node, so that no line breaks between them."""
    for node in list(doctree.findall(nodes.math)):
        siblings, i = node.parent.children, node.parent.index(node)
        if i + 1 < len(siblings) and isinstance(siblings[i + 1], nodes.Text):
            text = siblings[i + 1].astext()
            if match := CLOSING.match(text):
                node["after"] = match[0]
                node.parent[i + 1] = nodes.Text(text[match.end() :])
        if i > 0 and isinstance(siblings[i - 1], nodes.Text) and (match := OPENING.search(siblings[i - 1].astext())):
            node["before"] = match[0]
            node.parent[i - 1] = nodes.Text(siblings[i - 1].astext()[: match.start()])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the math renderer with Sphinx."""
    app.connect("doctree-resolved", _attach_punctuation)
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
