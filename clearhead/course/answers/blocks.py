"""An answer as a tree: paragraphs, lists, formulas, programs, tables, figures, worksheets and boxes.

Answers are parsed by markdown-it (CommonMark with tables). Placeholders are resolved while the tree is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Protocol, TypeAlias

from markdown_it import MarkdownIt
from markdown_it.token import Token

from clearhead.course.answers.content import AnswerFigure
from clearhead.course.exercises import Worksheet
from clearhead.errors import ConfigError

_INLINE = re.compile(r"\{\{\s*(\w+)\s+([^{}]*?)\s*\}\}")
_OWN_LINE = re.compile(r"^([ \t]*)(\{\{\s*(?!value\b)\w+\s[^{}]*\}\})[ \t]*$", re.MULTILINE)
_CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_FENCE = re.compile(r"^ {0,9}(```+|~~~+)[^\n]*\n.*?^ {0,9}\1[ ]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Span:
    """A piece of a line. `style` is "text", "strong", "emphasis" or "code"."""

    text: str
    style: str = "text"


Line: TypeAlias = tuple[Span, ...]


@dataclass(frozen=True)
class Paragraph:
    """Sentences."""

    line: Line


@dataclass(frozen=True)
class Heading:
    """A heading inside of an answer; `level` is 1 for the highest."""

    level: int
    line: Line


@dataclass(frozen=True)
class BulletList:
    """A list; `start` is the first number of an ordered list."""

    items: tuple[tuple[Block, ...], ...]
    start: int | None = None


@dataclass(frozen=True)
class Formula:
    """Displayed mathematics, one formula per line; lines may be indented."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """Code; `is_executable` if it can be executed, after the programs before it in the same answer.

    `language` is "python", or "text" for pseudo-code.
    """

    code: str
    is_executable: bool = False
    language: str = "python"


@dataclass(frozen=True)
class TableBlock:
    """A table; for each column, `numeric` tells whether it is right-aligned."""

    header: tuple[Line, ...]
    rows: tuple[tuple[Line, ...], ...]
    numeric: tuple[bool, ...]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure."""

    figure: AnswerFigure
    caption: str = ""


@dataclass(frozen=True)
class Sheet:
    """A worksheet, or some of its steps."""

    worksheet: Worksheet


@dataclass(frozen=True)
class Box:
    """Blocks with a frame and a title: a claim or a proof. `command` prints more about it."""

    title: str
    blocks: tuple[Block, ...]
    command: str = ""


Block: TypeAlias = Paragraph | Heading | BulletList | Formula | Program | TableBlock | Picture | Sheet | Box


class Resolver(Protocol):
    """Resolves placeholders."""

    def value(self, name: str) -> str:
        """Return the text of an inline placeholder."""
        ...

    def blocks(self, kind: str, name: str) -> tuple[Block, ...]:
        """Return the blocks of a placeholder that is alone on its line."""
        ...


def parse_blocks(text: str, resolver: Resolver) -> tuple[Block, ...]:
    """Parse an answer.

    Args:
        text: Markdown with placeholders.
        resolver: Computes what placeholders stand for.

    Returns:
        The blocks of the answer.

    Raises:
        ConfigError: If the text contains an unsupported construct or an unknown placeholder.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    separated = _OWN_LINE.sub(r"\n\1\2\n", text)  # a placeholder on its own line is a paragraph
    return tuple(_Builder(parser.parse(_escape_underscores(separated)), resolver).blocks())


def plain(text: str) -> Line:
    """Return a line without styles."""
    return (Span(text),)


def plain_text(line: Sequence[Span]) -> str:
    """Return the text of a line without its styles."""
    return "".join(span.text for span in line)


def walk(blocks: Sequence[Block]) -> Iterator[Block]:
    """Yield all blocks, including those in lists and boxes."""
    for block in blocks:
        yield block
        if isinstance(block, BulletList):
            for item in block.items:
                yield from walk(item)
        elif isinstance(block, Box):
            yield from walk(block.blocks)


def _escape_underscores(text: str) -> str:
    """Escape underscores outside of code: they are indices (d_k), never emphasis."""
    code = sorted([*_FENCE.finditer(text), *_CODE_SPAN.finditer(_FENCE.sub(_blank, text))], key=re.Match.start)
    pieces, end = [], 0
    for match in code:
        pieces += [text[end : match.start()].replace("_", r"\_"), text[match.start() : match.end()]]
        end = match.end()
    return "".join([*pieces, text[end:].replace("_", r"\_")])


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0])


class _Builder:
    """Turns the flat tokens of markdown-it into blocks."""

    def __init__(self, tokens: list[Token], resolver: Resolver) -> None:
        self.tokens = iter(tokens)
        self.resolver = resolver

    def blocks(self, end: str = "") -> Iterator[Block]:
        """Yield blocks up to the token named `end`."""
        for token in self.tokens:
            if token.type == end:
                return
            yield from self._block(token)

    def _block(self, token: Token) -> tuple[Block, ...]:
        if token.type == "paragraph_open":
            return self._paragraph()
        if token.type == "heading_open":
            line = self._line(next(self.tokens))
            next(self.tokens)
            return (Heading(max(1, int(token.tag[1]) - 1), line),)
        if token.type in ("bullet_list_open", "ordered_list_open"):
            return (self._list(token),)
        if token.type == "fence":
            return (self._fence(token),)
        if token.type == "table_open":
            return (self._table(),)
        raise ConfigError(f"an answer contains {token.type!r}; use paragraphs, headings, lists, tables and fences")

    def _paragraph(self) -> tuple[Block, ...]:
        inline = next(self.tokens)
        next(self.tokens)
        placeholder = _INLINE.fullmatch(inline.content.replace(r"\_", "_").strip())
        if placeholder is None or placeholder[1] == "value":
            return (Paragraph(self._line(inline)),)
        return self.resolver.blocks(placeholder[1], placeholder[2])

    def _list(self, token: Token) -> BulletList:
        end = token.type.replace("open", "close")
        items = []
        for inner in self.tokens:
            if inner.type == end:
                break
            items.append(tuple(self.blocks("list_item_close")))
        start = int(token.attrs.get("start", 1)) if token.type.startswith("ordered") else None
        return BulletList(tuple(items), start)

    def _fence(self, token: Token) -> Block:
        code = self._fill(token.content)
        if token.info == "math":
            return Formula(tuple(line.rstrip() for line in dedent(code).splitlines() if line.strip()))
        if token.info in ("python", "python run", "text", ""):
            return Program(code, token.info == "python run", (token.info or "text").split()[0])
        raise ConfigError(f"an answer contains a fence {token.info!r}; expected math, python, python run or text")

    def _table(self) -> TableBlock:
        rows: list[list[Line]] = []
        alignment: list[bool] = []
        for token in self.tokens:
            if token.type == "table_close":
                break
            if token.type == "tr_open":
                rows.append([])
            elif token.type in ("th_open", "td_open"):
                if token.type == "th_open":
                    alignment.append("right" in str(token.attrs.get("style", "")))
                rows[-1].append(self._line(next(self.tokens)))
        return TableBlock(tuple(rows[0]), tuple(map(tuple, rows[1:])), tuple(alignment))

    def _line(self, inline: Token) -> Line:
        """Return the spans of an inline token."""
        spans, style = [], "text"
        for token in inline.children or ():
            if token.type in ("strong_open", "em_open"):
                style = "strong" if token.type == "strong_open" else "emphasis"
            elif token.type in ("strong_close", "em_close"):
                style = "text"
            elif token.type in ("softbreak", "hardbreak"):
                spans.append(Span(" ", style))
            elif token.type == "code_inline":
                spans.append(Span(self._fill(token.content), "code"))
            elif token.type == "text":
                spans.append(Span(token.content, style))
            else:
                raise ConfigError(f"an answer contains {token.type!r} in a line; use **strong**, *emphasis* and `code`")
        # Escaped characters are separate tokens; placeholders are found in the joined text.
        return tuple(Span(self._fill(span.text), span.style) for span in _join(spans) if span.text)

    def _fill(self, text: str) -> str:
        """Replace inline placeholders by computed values."""

        def value(match: re.Match[str]) -> str:
            if match[1] != "value":
                raise ConfigError(f"the placeholder {match[0]} must be alone on its line; only values are inline")
            return self.resolver.value(match[2])

        return _INLINE.sub(value, text)


def _join(spans: Sequence[Span]) -> Iterator[Span]:
    """Join adjacent spans of the same style."""
    pending: Span | None = None
    for span in spans:
        if pending is not None and pending.style == span.style:
            pending = Span(pending.text + span.text, span.style)
            continue
        if pending is not None:
            yield pending
        pending = span
    if pending is not None:
        yield pending
