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
    """Write an exam: a question paper and a solution booklet with mark schemes for each variant.

    An exam file contains a title and one table per question: an exercise (sheet, points, steps), or parts with a text,
    points, and the kind of answer. Grade answers to exercises with `clearhead exercise grade`."""
    from clearhead.course.exams import exam_from_document, read_exam, write_exam

    with writing(out):
        selected_exam = read_exam(Path(questions)) if questions.endswith(".toml") else exam_from_document(questions)
        paths = write_exam(selected_exam, out, seed=seed, variants=variants)
    entries = [
        {
            "title": question.title,
            "sheet": question.exercise or None,
            "location": question.location or None,
            "points": question.points,
        }
        for question in selected_exam.questions
    ]
    files = [str(path) for path in paths]
    emit(
        json,
        {"title": selected_exam.title, "questions": entries, "points": selected_exam.points, "files": files},
        f"written: {', '.join(files)}",
    )
