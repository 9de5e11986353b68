"""Render a `Booklet` for the terminal and as Markdown, HTML, PDF or JSON."""

from clearhead.course.answers.render.html import html
from clearhead.course.answers.render.markdown import markdown
from clearhead.course.answers.render.structure import to_dict
from clearhead.course.answers.render.terminal import terminal
from clearhead.course.answers.render.typst import pdf, typst_source

__all__ = ["html", "markdown", "pdf", "terminal", "to_dict", "typst_source"]
