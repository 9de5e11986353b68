"""Equations as MathML, which browsers typeset themselves: no script, no font and no request for a page to wait for."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.errors import SphinxError


def _mathml(tex: str, *, block: bool) -> str:
    try:
        found = latex2mathml.tex2mathml(tex, as_block=block)
    except MathError as error:
        raise SphinxError(f"the equation {tex!r} cannot be read: {error}") from error
    return found.replace("<math ", f'<math aria-label="{escape(tex)}" ', 1)


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_mathml(node.astext(), block=False))
    raise nodes.SkipNode


def _display(translator: Any, node: nodes.math_block) -> None:
    name = node.get("ids") or []
    where = f' id="{escape(name[0])}"' if name else ""
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    translator.body.append(f'<div class="math"{where}>{_mathml(node.astext(), block=True)}{number}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
