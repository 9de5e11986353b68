"""Link inline code in the book and the guides to the reference, and list the names that the cells of a page use.

`ch.attend`, `analysis.trace` and `Sinusoidal()` become links to their entries, `clearhead exercise solve …` to the page
of the command. Bare words such as `padding` are linked only if a cell of the page uses the function.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import api_reference

if TYPE_CHECKING:  # only for the build; the tests run without Sphinx
    from docutils import nodes
    from sphinx.application import Sphinx

FOLDERS = ("book/", "guides/")
_CELL = re.compile(r"^```\{code-cell\}.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r"^ *from clearhead[\w.]* import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_ATTRIBUTE = re.compile(r"\b(?:ch|analysis|hub|masks|exercises|claims)\.(\w+)")
_NAME = re.compile(
    r"(?P<package>(?:clearhead|ch|analysis|hub|masks|exercises|claims|generation)\.(?:\w+\.)*)?"
    r"(?P<name>\w+)(?P<call>\([^()]*(?:\([^()]*\)[^()]*)*\))?"
)


@cache
def entries() -> Mapping[str, tuple[str, str]]:
    """Return the page and the anchor of each public class and function; the first package has precedence."""
    anchors: dict[str, tuple[str, str]] = {}
    for package in api_reference.PACKAGES:
        for name, value in api_reference.public(package).items():
            if not inspect.ismodule(value):
                page = f"reference/api-{package.replace('.', '-')}"
                anchors.setdefault(name, (page, api_reference.anchor(package, name, value)))
    return anchors


@cache
def command_names() -> frozenset[str]:
    """Return the names of all commands, such as "exercise solve"."""
    every_command = importlib.import_module("clearhead.cli.app").every_command
    return frozenset(" ".join(words) for words in every_command())


def names_in_cells(source: str) -> list[str]:
    """Return the public names that the cells of a page import or use, in alphabetical order."""
    names: set[str] = set()
    for cell in _CELL.findall(source):
        for imported in _IMPORT.findall(cell):
            names |= set(re.findall(r"\w+", imported))
        names |= set(_ATTRIBUTE.findall(cell))
    return sorted(names & entries().keys(), key=lambda name: (name.lower(), name))


def target(text: str, used: frozenset[str] = frozenset()) -> tuple[str, str] | None:
    """Return the page and the anchor that inline code refers to, or None."""
    words = text.split()
    if words[:1] == ["clearhead"]:
        for n_words in (2, 1):
            name = " ".join(words[1 : 1 + n_words])
            if len(words) > n_words and name in command_names():
                return f"reference/command-{name.replace(' ', '-')}", ""
        return None
    match = _NAME.fullmatch(text)
    if match is None or match["name"] not in entries():
        return None
    is_qualified = bool(match["package"]) or bool(match["call"])
    is_class = match["name"][0].isupper()
    return entries()[match["name"]] if is_qualified or is_class or match["name"] in used else None


def _reference(app: Sphinx, page: str, to: tuple[str, str], child: nodes.Node) -> nodes.reference:
    from docutils import nodes

    uri = app.builder.get_relative_uri(page, to[0]) + (f"#{to[1]}" if to[1] else "")
    return nodes.reference("", "", child, internal=True, refuri=uri)


def _add_links(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Replace inline code by links, and append the list of names to chapters."""
    from docutils import nodes

    if not page.startswith(FOLDERS):
        return
    with open(app.env.doc2path(page), encoding="utf-8") as file:
        names = names_in_cells(file.read())
    for literal in list(doctree.findall(nodes.literal)):
        to = target(literal.astext(), frozenset(names))
        if to is not None and not any(isinstance(parent, nodes.reference | nodes.title) for parent in _above(literal)):
            literal.parent.replace(literal, _reference(app, page, to, literal.deepcopy()))
    sections = list(doctree.findall(nodes.section))
    if names and sections and page.startswith("book/"):
        paragraph = nodes.paragraph("", "In the reference: ")
        for i, name in enumerate(names):
            paragraph += nodes.Text(", " if i else "")
            paragraph += _reference(app, page, entries()[name], nodes.literal("", name))
        sections[0] += paragraph


def _above(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the event handler with Sphinx."""
    app.connect("doctree-resolved", _add_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
