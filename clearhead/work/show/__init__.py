"""A `Work` on paper: for the terminal, as Markdown, LaTeX and HTML, and as one JSON document."""

from __future__ import annotations

from clearhead.work.show.html import html
from clearhead.work.show.json_document import to_dict
from clearhead.work.show.latex import latex
from clearhead.work.show.layout import Style
from clearhead.work.show.markdown import markdown
from clearhead.work.show.terminal import terminal

__all__ = ["Style", "html", "latex", "markdown", "terminal", "to_dict"]
