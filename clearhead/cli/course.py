"""`clearhead course`: the course documents, and the commands that answer their questions."""

from __future__ import annotations

from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.options import Json, argument
from clearhead.cli.output import console, emit, print_wrapped, show_json, show_picture, table

course = typer.Typer(
    help="The exams and exercises of five course documents, with the commands that answer each question.",
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
    json: Json = False,
) -> None:
    """Print every question of a course document and the commands that answer it."""
    from clearhead.course.sources import document

    entry = document(name)
    if json:
        return show_json(entry.to_dict())
    console.print(f"{entry.name}. {entry.description}", markup=False, style="bold")
    for question in entry.questions:
        points = f" ({question.points} points)" if question.points else ""
        print_wrapped(f"\n{question.location}{points}: {question.text}")
        for part in question.answers:
            show_picture(f"   clearhead {part.command.format(folder='.')}")  # not wrapped, so that it can be copied
            print_wrapped(part.description, indent=5, hang=0)
