"""`clearhead exam`: question papers with points, in variants, and their solution booklets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from clearhead.cli.app import app
from clearhead.cli.options import Json, option
from clearhead.cli.output import emit, writing


@app.command()
def exam(
    questions: Annotated[
        str, option("Name of a course document, such as ceng403-exam, or an exam file (.toml).", "--from")
    ],
    out: Annotated[
        Path,
        option(
            "The question paper: .pdf, .typ, .tex or .md; the booklet is written to the same folder.", "--out", "-o"
        ),
    ] = Path("exam.pdf"),
    seed: Annotated[
        int | None, option("New numbers of the same difficulty; the same seed gives the same exam.", min=0)
    ] = None,
    variants: Annotated[int, option("Number of variants, named A, B, C; each has other numbers.", min=1, max=26)] = 1,
    json: Json = False,
) -> None:
    """Write an exam: a question paper and a solution booklet for each variant.

    An exam file contains a title and one question table per exercise. Keys of a question: sheet (a bundled exercise or
    a problem file), points, and steps to ask only some of them. Grade answers with `clearhead exercise grade`."""
    from clearhead.course.exercises.exam import exam_from_document, read_exam, write_exam

    with writing(out):
        selected_exam = read_exam(Path(questions)) if questions.endswith(".toml") else exam_from_document(questions)
        paths = write_exam(selected_exam, out, seed=seed, variants=variants)
    sheets = [{"sheet": task.sheet, "points": task.points} for task in selected_exam.tasks]
    files = [str(path) for path in paths]
    emit(json, {"title": selected_exam.title, "questions": sheets, "files": files}, f"written: {', '.join(files)}")
