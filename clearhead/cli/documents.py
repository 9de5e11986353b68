"""`clearhead documents`: the five documents, and what answers each of their questions here."""

from __future__ import annotations

from typing import Annotated

from clearhead.cli.app import app
from clearhead.cli.options import Json, argument
from clearhead.cli.output import answer, console, say, show_json, show_picture, table


@app.command()
def documents(
    number: Annotated[str | None, argument("One of them, from 000 to 004; none lists them.")] = None, json: Json = False
) -> None:
    """List the exams and exercises that clearhead answers, or every question of one with the commands that do."""
    from clearhead.documents import document
    from clearhead.documents import documents as known

    if number is None:
        rows = [(one.number, one.name, len(one.questions), one.about) for one in known().values()]
        shown = table(("number", "document", "questions", "what it is"), rows)
        return answer(json, [one.to_dict() for one in known().values()], shown)
    chosen = document(number)
    if json:
        return show_json(chosen.to_dict())
    console.print(f"{chosen.name}. {chosen.about}", markup=False, style="bold")
    for question in chosen.questions:
        points = f" ({question.points} points)" if question.points else ""
        say(f"\n{question.place}{points}: {question.asks}")
        for part in question.answers:
            show_picture(f"   clearhead {part.command.format(folder='.')}")  # to be copied, so never cut or wrapped
            say(part.shows, indent=5, hang=0)
