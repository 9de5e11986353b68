"""`clearhead exam`: question papers with points, in variants, and their solution booklets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from clearhead.cli.app import app
from clearhead.cli.options import Json, option
from clearhead.cli.output import answer, writing


@app.command()
def exam(
    questions: Annotated[
        str, option("A document by its number (000 to 004), or a .toml file with sheets and points.", "--from")
    ],
    out: Annotated[
        Path, option("The question paper: .pdf, .typ, .tex or .md; the booklet stands beside it.", "--out", "-o")
    ] = Path("exam.pdf"),
    seed: Annotated[
        int | None, option("New numbers of the same difficulty; the same seed, the same exam.", min=0)
    ] = None,
    variants: Annotated[int, option("How many variants, named A, B, C; each has its own numbers.", min=1, max=26)] = 1,
    json: Json = False,
) -> None:
    """Write an exam: a question paper and a solution booklet for each variant.

    A file of one's own has a title and a table question for each sheet, with the keys sheet (a shipped one or a problem
    file), points and, where not all steps are asked, steps. Answers are graded by clearhead exercise grade."""
    from clearhead.work.exam import exam_from_document, read_exam, write_exam

    with writing(out):
        chosen = read_exam(Path(questions)) if questions.endswith(".toml") else exam_from_document(questions)
        written = write_exam(chosen, out, seed=seed, variants=variants)
    sheets, files = [{"sheet": task.sheet, "points": task.points} for task in chosen.tasks], list(map(str, written))
    answer(json, {"title": chosen.title, "questions": sheets, "files": files}, f"written: {', '.join(files)}")
