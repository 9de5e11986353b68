"""How commands speak: tables and pictures for people, one JSON document for programs, one line for an error."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from clearhead.errors import ConfigError, StorageError


class _Console(Console):
    """A console that loses nothing: a table that does not fit becomes a list, one row after the other."""

    def print(self, *objects: Any, **options: Any) -> None:
        if len(objects) == 1 and isinstance(objects[0], Table):
            objects = (self._fitted(objects[0]),)
        super().print(*objects, **options)

    def _fitted(self, rows: Table) -> RenderableType:
        if fits(rows):
            return rows
        cells = [[column.header, *column.cells] for column in rows.columns]
        heads = [str(head) for head in (rows.title, cells[0][0]) if str(head or "")]
        lines: list[RenderableType] = [Text(head, style="dim") for head in heads]
        for first, *others in zip(*(column[1:] for column in cells), strict=True):
            inner = len(str(first)) - len(str(first).lstrip()) + 2
            lines.append(Text(str(first), style="bold"))
            for (name, *_), cell in zip(cells[1:], others, strict=True):
                if str(cell):
                    told = Text.assemble(f"{name}: " if str(name) else "", cell)
                    lines.append(Padding(told, (0, 0, 0, inner), expand=False))
        return Group(*lines)


console = _Console(highlight=False, emoji=False)

# One sign for one, so that columns stay columns; what is not here is shown as a question mark.
_PLAIN = str.maketrans("■█▓▒░·−–×…→←✓✗▁▂▃▄▅▆▇“”’", '##%+:.--x.><+x_.,-=+*""\'')


def _plain(error: UnicodeError) -> tuple[str, int]:
    """How signs are shown that a stream has no code for, such as drawings where only ASCII is known."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(sign if sign.isascii() else "?" for sign in signs), error.end


def prepare_streams() -> None:
    """Make printing safe: a closed stream (`>&-`) swallows everything, and one of ASCII alone gets what it can show."""
    codecs.register_error("clearhead", _plain)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="clearhead")


def show_json(document: Any) -> None:
    """One JSON document on standard output, which says every sign in ASCII where the stream knows no more."""
    whole = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=not whole) + "\n")


def emit(json: bool, document: Any, *shown: RenderableType) -> None:
    """One JSON document for programs; for people tables and lines, of which none is wrapped: they may hold a path."""
    if json:
        return show_json(document)
    for part in shown:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def print_line(text: str, **how: Any) -> None:
    """A line that is not wrapped, as one with a path must not be."""
    console.print(text, markup=False, soft_wrap=True, **how)


def use_color() -> bool:
    """Whether pictures in the terminal have colours."""
    return console.is_terminal and not console.no_color


@contextmanager
def progress(what: str, *columns: Any, hidden: bool, transient: bool = True) -> Iterator[Callable[..., None]]:
    """A bar while something is done; yields what is told how much is done, of how much, and what comes next."""
    from rich.progress import Progress

    shown = (*Progress.get_default_columns(), *columns)
    with Progress(*shown, console=console, transient=transient, disable=hidden) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total, what=None: bars.update(bar, completed=done, total=total, description=what)


def fits(rows: Table) -> bool:
    """Whether a table can be printed with no word of it broken, if need be with one column between its cells; it then
    has the widths for that, for rich takes room from its columns without a look at their words."""
    cells = [[str(cell) for cell in (column.header, *column.cells)] for column in rows.columns]
    widest = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in cells]
    least = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    least = [
        max(n, column.min_width or 0, min(w, 14)) for n, w, column in zip(least, widest, rows.columns, strict=True)
    ]
    for gap, rows.padding in ((2, (0, 1)), (1, (0, 1, 0, 0))):
        room = console.width - gap * (len(cells) - 1)
        if sum(least) <= room:
            break
    else:
        return False
    while sum(widest) > room:
        most = max((i for i, n in enumerate(least) if n < widest[i]), key=widest.__getitem__)
        widest[most] -= 1
    for column, width in zip(rows.columns, widest, strict=True):
        column.width = width
    return True


def print_wrapped(text: str, *, indent: int = 0, hang: int = 2, style: str | None = None) -> None:
    """Sentences, broken by the terminal's width, further lines indented; paths and identifiers are never broken."""
    for line in text.split("\n"):
        indents: dict[str, Any] = {"initial_indent": " " * indent, "subsequent_indent": " " * (indent + hang)}
        wrapped = textwrap.wrap(line, console.width, **indents, break_long_words=False, break_on_hyphens=False)
        console.print("\n".join(wrapped), markup=False, soft_wrap=True, style=style)


def show_picture(text: str) -> None:
    """Text whose columns matter: printed as it is, never wrapped or styled."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> Table:
    """A plain table of plain text; columns whose cells are all numbers are set to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        numeric = bool(cells) and all(row[i][:1] in "-+−0123456789" for row in cells if row[i])
        longest = max([len(row[i]) for row in cells]) if numeric else None
        result.add_column(Text(column), justify="right" if numeric else "left", min_width=longest)
    for row in cells:
        # As text, for a path may hold what rich would read as its markup.
        result.add_row(*map(Text, row))
    return result


FIGURES = (".png", ".svg", ".pdf")


@contextmanager
def writing(path: Path, endings: Sequence[str] = ()) -> Iterator[None]:
    """Around what makes a file and writes it: its folder is made, and a file that cannot be is refused in one sentence,
    before anything is computed where that can be known."""
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{path.name or path} is no name for such a file; end it in {', '.join(endings)}")
    if path.is_dir():
        raise StorageError(f"{path} is a folder; give the name of a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def fail(message: str) -> NoReturn:
    """One line on standard error, and exit status 1."""
    sys.stderr.write(f"clearhead: {message}\n")
    sys.exit(1)
