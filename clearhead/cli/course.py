"""`clearhead course`: the course documents, and the commands that answer their questions."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead._core.validation import lookup
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import (
    console,
    emit,
    print_line,
    print_wrapped,
    show_json,
    show_picture,
    table,
    to_json,
    writing,
)
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from clearhead.course.answers.booklet import Booklet

Format = StrEnum("Format", "terminal markdown html pdf typst json")
_FORMAT_OF_ENDING = {
    ".txt": "terminal",
    ".md": "markdown",
    ".html": "html",
    ".pdf": "pdf",
    ".typ": "typst",
    ".json": "json",
}

course = typer.Typer(
    help="The exams and exercises of five course documents, with model answers and mark schemes.",
    no_args_is_help=True,
)
app.add_typer(course, name="course")


@course.command("list")
def list_documents(json: Json = False) -> None:
    """List the course documents."""
    from clearhead.course.sources import documents

    entries = documents().values()
    rows = [(entry.slug, entry.name, len(entry.questions), entry.description) for entry in entries]
    emit(json, [entry.to_dict() for entry in entries], table(("name", "document", "questions", "description"), rows))


@course.command("show")
def show_document(
    name: Annotated[str, argument("Name of a course document, as in `course list`.", metavar="NAME")],
    question: Annotated[
        str | None, argument("Number of a question, such as Q1a; prints its model answer.", metavar="QUESTION")
    ] = None,
    booklet: Annotated[bool, option("Print the model answers to all questions.", "--booklet")] = False,
    format: Annotated[
        Format | None, option(f"Output format: {', '.join(Format)}.", "--format", "-f", metavar="FORMAT")
    ] = None,
    out: Annotated[Path | None, option(f"Output file: {', '.join(_FORMAT_OF_ENDING)}.", "--out", "-o")] = None,
    json: Json = False,
) -> None:
    """Print the questions of a course document, or model answers with mark schemes.

    Without QUESTION, the questions and the commands that answer them are listed. With QUESTION, its model answer is
    printed; with --booklet, --format or --out, those of the whole document. The numbers in an answer are computed when
    it is printed."""
    if question is not None and booklet:
        raise ConfigError(
            f"got the question {question!r} and --booklet, which prints all questions; give only one of them"
        )
    if question is None and not booklet and format is None and out is None:
        return _list_questions(name, json)
    selected = Format.json if json else format or _format_of(out)
    _write(_render(name, question, selected), out)


def _list_questions(name: str, json: bool) -> None:
    from clearhead.course.sources import document

    entry = document(name)
    if json:
        return show_json(entry.to_dict())
    console.print(f"{entry.name}. {entry.description}", markup=False, style="bold")
    for question in entry.questions:
        points = f" ({question.points} points)" if question.points else ""
        print_wrapped(f"\n{question.location}. {question.title}{points}: {question.text}")
        for part in question.answers:
            show_picture(f"   clearhead {part.command.format(folder='.')}")  # not wrapped, so that it can be copied
            print_wrapped(part.description, indent=5, hang=0)


def _format_of(out: Path | None) -> Format:
    """Return the format of an output file; terminal if there is none."""
    if out is None:
        return Format.terminal
    return Format(lookup(out.suffix.lower(), _FORMAT_OF_ENDING, "no format of model answers has the file ending"))


def _render(name: str, question: str | None, format: Format) -> str | bytes:
    """Compute the answers and render them."""
    from clearhead.course.answers import render
    from clearhead.course.answers.booklet import booklet

    answers = booklet(name, question)
    if format is Format.json:
        return to_json(render.to_dict(answers))
    if format is Format.terminal:
        return render.terminal(answers, max(24, min(console.width, 100)))
    functions: dict[Format, Callable[[Booklet], str | bytes]] = {
        Format.html: render.html,
        Format.markdown: render.markdown,
        Format.pdf: render.pdf,
        Format.typst: render.typst_source,
    }
    return functions[format](answers)


def _write(content: str | bytes, out: Path | None) -> None:
    """Write a file, or print text."""
    if out is not None:
        with writing(out):
            out.write_bytes(content if isinstance(content, bytes) else content.encode())
        print_line(f"written: {out}")
    elif isinstance(content, bytes):
        raise ConfigError("a PDF cannot be printed; give a file, such as --out answers.pdf")
    else:
        show_picture(content)
