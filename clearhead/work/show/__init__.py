"""Render a `Worksheet` for the terminal and as Markdown, LaTeX, HTML or JSON."""

from clearhead.work.show.formats import html, markdown, terminal, to_dict
from clearhead.work.show.latex import latex
from clearhead.work.show.layout import Style

__all__ = ["Style", "html", "latex", "markdown", "terminal", "to_dict"]
