"""Output of commands: tables and drawings for people, one JSON document for programs, one line for an error."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import ProgressColumn
from rich.table import Table
from rich.text import Text

from clearhead.errors import ClearheadError, ConfigError, StorageError


class _Console(Console):
    """A console that truncates nothing: a table that does not fit is printed as a list of rows."""

    def print(self, *objects: object, **options: Any) -> None:
        """Print objects; a single table is refitted to the width."""
        if len(objects) == 1 and isinstance(objects[0], Table):
            objects = (self._fitted(objects[0]),)
        super().print(*objects, **options)

    def _fitted(self, rows: Table) -> RenderableType:
        """Return the table, or a list of its rows if it does not fit."""
        if fits(rows):
            return rows
        cells = [[column.header, *column.cells] for column in rows.columns]
        headings = [str(heading) for heading in (rows.title, cells[0][0]) if str(heading or "")]
        lines: list[RenderableType] = [Text(heading, style="dim") for heading in headings]
        for first, *values in zip(*(column[1:] for column in cells), strict=True):
            indent = len(str(first)) - len(str(first).lstrip()) + 2
            lines.append(Text(str(first), style="bold"))
            for (name, *_), cell in zip(cells[1:], values, strict=True):
                if str(cell):
                    line = Text.assemble(f"{name}: " if str(name) else "", cell)
                    lines.append(Padding(line, (0, 0, 0, indent), expand=False))
        return Group(*lines)


console = _Console(highlight=False, emoji=False)

# ASCII replacements of the same width, so that columns stay aligned; other characters become a question mark.
_ASCII = str.maketrans("■█▓▒░·−–×…→←✓✗▁▂▃▄▅▆▇“”’", '##%+:.--x.><+x_.,-=+*""\'')


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a stream cannot encode, such as those of drawings on an ASCII terminal."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end].translate(_ASCII)
    return "".join(character if character.isascii() else "?" for character in characters), error.end


def prepare_streams() -> None:
    """Make printing safe: discard output to a closed stream (`>&-`), and replace what an ASCII stream cannot encode."""
    codecs.register_error("clearhead", _replace_unencodable)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="clearhead")


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print the package's own warnings inside the block as one line, without the line of source code."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, RuntimeWarning) and "clearhead" in Path(filename).parts:
            sys.stderr.write(f"clearhead: {message}\n")
        else:
            original(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        original = warnings.showwarning
        warnings.showwarning = show  # the hook that the standard library provides for this
        yield


def show_json(document: object) -> None:
    """Print one JSON document, with escapes if the stream is not UTF."""
    sys.stdout.write(to_json(document) + "\n")


def to_json(document: object) -> str:
    """Return a JSON document, with escapes if standard output is not UTF."""
    is_utf = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    return json.dumps(document, indent=2, ensure_ascii=not is_utf)


def emit(json: bool, document: object, *renderables: RenderableType) -> None:
    """Print a JSON document, or else tables and lines; lines are not wrapped, because they may contain paths."""
    if json:
        return show_json(document)
    for renderable in renderables:
        console.print(renderable, markup=False, soft_wrap=isinstance(renderable, str))


def print_line(text: str, **options: object) -> None:
    """Print a line without wrapping it, because it may contain a path."""
    console.print(text, markup=False, soft_wrap=True, **options)


def use_color() -> bool:
    """Return whether drawings in the terminal have colors."""
    return console.is_terminal and not console.no_color


@contextmanager
def progress(
    label: str, *columns: ProgressColumn, hidden: bool, transient: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a progress bar; yield a function of (completed, total, label) that updates it.

    A total of None is unknown."""
    from rich.progress import Progress

    all_columns = (*Progress.get_default_columns(), *columns)
    is_hidden = hidden or (transient and not console.is_terminal)  # in a file a transient bar would be an empty line
    with Progress(*all_columns, console=console, transient=transient, disable=is_hidden) as bars:
        bar = bars.add_task(label, total=None)
        yield lambda completed, total, label=None: bars.update(bar, completed=completed, total=total, description=label)


def fits(rows: Table) -> bool:
    """Return whether a table fits without breaking a word, if necessary with one space between columns.

    Sets the column widths if it fits, because rich would otherwise shrink columns below their longest word."""
    cells = [[str(cell) for cell in (column.header, *column.cells)] for column in rows.columns]
    widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in cells]
    longest_words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    minimum_widths = [
        max(word, column.min_width or 0, min(width, 14))
        for word, width, column in zip(longest_words, widths, rows.columns, strict=True)
    ]
    for gap, padding in ((2, (0, 1)), (1, (0, 1, 0, 0))):
        rows.padding = padding
        available = console.width - gap * (len(cells) - 1)
        if sum(minimum_widths) <= available:
            break
    else:
        return False
    while sum(widths) > available:
        shrinkable = (i for i, minimum in enumerate(minimum_widths) if minimum < widths[i])
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    for column, width in zip(rows.columns, widths, strict=True):
        column.width = width
    return True


def print_wrapped(text: str, *, indent: int = 0, hang: int = 2, style: str | None = None) -> None:
    """Print sentences wrapped to the terminal, with a hanging indent; paths and identifiers are never broken."""
    for line in text.split("\n"):
        wrapped = textwrap.wrap(
            line,
            console.width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hang),
            break_long_words=False,
            break_on_hyphens=False,
        )
        console.print("\n".join(wrapped), markup=False, soft_wrap=True, style=style)


def show_picture(text: str) -> None:
    """Print text whose columns matter, without wrapping or style."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """Return a table of plain text; columns of numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    result = Table(
        title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", show_header=any(columns)
    )
    for i, column in enumerate(columns):
        is_numeric = bool(cells) and all(row[i][:1] in "-+−0123456789" for row in cells if row[i])
        longest = max([len(row[i]) for row in cells]) if is_numeric else None
        result.add_column(Text(column), justify="right" if is_numeric else "left", min_width=longest)
    for row in cells:
        # As Text objects, because rich would read brackets in a path as markup.
        result.add_row(*map(Text, row))
    return result


FIGURES = (".png", ".svg", ".pdf")


@contextmanager
def writing(path: Path, endings: Sequence[str] = ()) -> Iterator[None]:
    """Create the folder of an output file before the block computes it; raise StorageError if it cannot be written."""
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"cannot write {path.name or path}: unknown file type; end it in {', '.join(endings)}")
    if path.is_dir():
        raise StorageError(f"{path} is a folder; give the name of a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except ClearheadError:
        raise  # a StorageError is an OSError too, but may be about another file
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def fail(message: str) -> NoReturn:
    """Print one line to standard error and exit with status 1."""
    sys.stderr.write(f"clearhead: {message}\n")
    sys.exit(1)
