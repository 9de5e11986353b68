"""Render equations as MathML, which browsers typeset without scripts, fonts or network requests."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

# Commands that docutils' LaTeX parser does not support, and their replacements.
ALIASES = {r"\dots": r"\ldots", r"\mathrm{E}": r"\operatorname{E}", r"\!": ""}


def mathml(tex: str, *, block: bool) -> str:
    """Convert an equation from LaTeX to MathML; raise MathError if it cannot be parsed."""
    for command, replacement in ALIASES.items():
        tex = tex.replace(command, replacement)
    markup: str = latex2mathml.tex2mathml(tex, as_block=block)
    return markup


def _markup(node: Any, *, block: bool) -> str:
    """Return the MathML of a node, or its source as code, with a warning, if it cannot be parsed."""
    try:
        return mathml(node.astext(), block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("cannot parse the equation %r: %s", node.astext(), error, location=node)
        return f"<code>{escape(node.astext())}</code>"


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_markup(node, block=False))
    raise nodes.SkipNode


def _display(translator: Any, node: nodes.math_block) -> None:
    ids = node.get("ids") or []
    id_attribute = f' id="{escape(ids[0])}"' if ids else ""
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    translator.body.append(f'<div class="math"{id_attribute}>{_markup(node, block=True)}{number}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the math renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
