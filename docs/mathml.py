"""Equations as MathML, which browsers typeset themselves: no script, no font and no request for a page to wait for."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

# What docutils' reader of LaTeX does not know, as it knows it.
ALIASES = {r"\dots": r"\ldots", r"\mathrm{E}": r"\operatorname{E}", r"\!": ""}


def mathml(tex: str, *, block: bool) -> str:
    """An equation in LaTeX as MathML; a `MathError` where it cannot be read."""
    plain = tex
    for name, known in ALIASES.items():
        plain = plain.replace(name, known)
    found: str = latex2mathml.tex2mathml(plain, as_block=block)
    return found


def _made(node: Any, *, block: bool) -> str:
    try:
        return mathml(node.astext(), block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("%r cannot be read: %s", node.astext(), error, location=node)
        return f"<code>{escape(node.astext())}</code>"


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_made(node, block=False))
    raise nodes.SkipNode


def _display(translator: Any, node: nodes.math_block) -> None:
    name = node.get("ids") or []
    where = f' id="{escape(name[0])}"' if name else ""
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    translator.body.append(f'<div class="math"{where}>{_made(node, block=True)}{number}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
