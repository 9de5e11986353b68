"""`clearhead exam`: question papers with points, in variants, and their solution booklets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import Json, console, show_json, writing


@app.command()
def exam(
    questions: Annotated[
        str,
        typer.Option("--from", help="A document by its number (000 to 004), or a .toml file with sheets and points."),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The question paper: .pdf, .typ, .tex or .md; the booklet stands beside it."),
    ] = Path("exam.pdf"),
    seed: Annotated[
        int | None, typer.Option(help="New numbers of the same difficulty; the same seed, the same exam.", min=0)
    ] = None,
    variants: Annotated[
        int, typer.Option(help="How many variants, named A, B, C; each has its own numbers.", min=1, max=26)
    ] = 1,
    json: Json = False,
) -> None:
    """Write an exam: a question paper and a solution booklet for each variant.

    A file of one's own has a title and a table question for each sheet, with the keys sheet (a shipped one or a problem
    file), points and, where not all steps are asked, steps. Answers are marked by clearhead work."""
    from clearhead.work.exam import exam_from, read_exam, write_exam

    with writing(out):
        chosen = read_exam(Path(questions)) if questions.endswith(".toml") else exam_from(questions)
        written = write_exam(chosen, out, seed=seed, variants=variants)
    if json:
        sheets = [{"sheet": task.sheet, "points": task.points} for task in chosen.tasks]
        show_json({"title": chosen.title, "questions": sheets, "files": [str(path) for path in written]})
    else:
        console.print("written: " + ", ".join(map(str, written)), markup=False, soft_wrap=True)
