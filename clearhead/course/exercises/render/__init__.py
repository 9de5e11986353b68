"""Render a `Worksheet` for the terminal and as Markdown, LaTeX, HTML or JSON."""

from clearhead.course.exercises.render.formats import html, markdown, terminal, to_dict
from clearhead.course.exercises.render.latex import latex
from clearhead.course.exercises.render.layout import Style

__all__ = ["Style", "html", "latex", "markdown", "terminal", "to_dict"]
