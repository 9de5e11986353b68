"""`clearhead documents`: the five documents, and what answers each of their questions here."""

from __future__ import annotations

from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import Json, console, say, show_json, show_picture, table


@app.command()
def documents(
    number: Annotated[str | None, typer.Argument(help="One of them, from 000 to 004; none lists them.")] = None,
    json: Json = False,
) -> None:
    """List the exams and exercises that clearhead answers, or every question of one with the commands that do."""
    from clearhead.documents import document
    from clearhead.documents import documents as known

    if number is None:
        if json:
            show_json([one.to_dict() for one in known().values()])
            return
        rows = [(one.number, one.name, len(one.questions), one.about) for one in known().values()]
        console.print(table(("number", "document", "questions", "what it is"), rows))
        return
    chosen = document(number)
    if json:
        show_json(chosen.to_dict())
        return
    console.print(f"{chosen.name}. {chosen.about}", markup=False, style="bold")
    for question in chosen.questions:
        points = f" ({question.points} points)" if question.points else ""
        say(f"\n{question.place}{points}: {question.asks}")
        for answer in question.answers:
            show_picture(f"   clearhead {answer.command.format(folder='.')}")  # to be copied, so never cut or wrapped
            say(answer.shows, indent=5, hang=0)
