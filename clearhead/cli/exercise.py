"""`clearhead exercise`: worksheets with exact solutions, grading of answers, and starter code."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import clearhead as ch
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import console, emit, print_line, print_wrapped, show_json, show_picture, table
from clearhead.errors import ConfigError

exercise = typer.Typer(
    help="Exercises with exact solutions: worksheets with new numbers per seed, grading, and starter code.",
    no_args_is_help=True,
)
app.add_typer(exercise, name="exercise")

Format = StrEnum("Format", "terminal markdown latex html json")

Name = Annotated[str, argument("A bundled exercise or a problem file (.toml).", metavar="NAME")]
Seed = Annotated[int | None, option("New numbers of the same difficulty; the same seed gives the same numbers.", min=0)]


@exercise.command("list")
def list_exercises(json: Json = False) -> None:
    """List the bundled exercises."""
    titles = ch.course.exercises.bundled_problems()
    document = [{"name": name, "title": title} for name, title in titles.items()]
    emit(json, document, table(("exercise", "title"), titles.items()))


@exercise.command()
def solve(
    name: Name,
    format: Annotated[
        Format, option(f"Output format: {', '.join(Format)}.", "--format", "-f", metavar="FORMAT")
    ] = Format.terminal,
    digits: Annotated[int, option("Digits after the decimal point.", min=1, max=50)] = 4,
    seed: Seed = None,
    questions_only: Annotated[
        bool, option("Print the question sheet, with empty answers.", "--questions-only")
    ] = False,
    json: Json = False,
) -> None:
    """Solve an exercise step by step, in exact numbers and in decimals.

    The name of each step is in square brackets; answer files use it (see clearhead exercise grade)."""
    from clearhead.course.exercises import render

    if json:
        format = Format.json
    worksheet = _worksheet(name, seed)
    style = render.Style(digits, questions_only, max(24, min(console.width, 120)))
    if format is Format.json:
        show_json(render.to_dict(worksheet, style))
    else:
        show_picture(getattr(render, format)(worksheet, style))
    raise typer.Exit(0 if worksheet.agrees else 1)


@exercise.command()
def grade(
    name: Annotated[str, argument("An exercise or a problem file; for a .py file, a starter.", metavar="NAME")],
    files: Annotated[
        list[Path], argument("Answer files (.toml, .json, .csv), folders of them, or one .py file.", metavar="FILES")
    ],
    seed: Seed = None,
    json: Json = False,
) -> None:
    """Grade answers; the exit status is 1 if any cell is wrong.

    An answer file has an entry for each step: name = number, list or matrix. A cell may be 3, "1/3", 0.3333 or
    "e^3/(2*e^3 + 4)". A wrong cell that follows from an earlier mistake gets credit (→), and common errors are named.
    Several files (answers/*.json) give a table of grades.

    A .py file contains a completed starter; it is executed and its output is compared with the reference solution.

    Free text is not graded: clearhead course show NAME QUESTION prints a model answer and a mark scheme."""
    _reject_free_text(name, files)
    if any(file.suffix == ".py" for file in files):
        if len(files) > 1 or seed is not None:
            raise typer.BadParameter("a program is graded alone: give one .py file, and no --seed")
        _grade_program(name, files[0], json)
    else:
        _grade_answers(_worksheet(name, seed), ch.course.exercises.answer_files(files), json)


@exercise.command()
def starter(
    name: Annotated[str | None, argument("A starter; without it, all are listed.", metavar="NAME")] = None,
    solution: Annotated[bool, option("Print the solution instead of the code to complete.", "--solution")] = False,
    json: Json = False,
) -> None:
    """Print starter code to complete, or its solution; clearhead exercise grade NAME mine.py grades it."""
    from clearhead.course.exercises import starter_code

    if name is None:
        if solution:
            raise typer.BadParameter("--solution needs the name of a starter")
        titles = starter_code.starters()
        document = [{"name": key, "title": title} for key, title in titles.items()]
        return emit(json, document, table(("starter", "title"), titles.items()))
    code = starter_code.solution_code(name) if solution else starter_code.starter_code(name)
    if json:
        return show_json({"name": name, "code": code})
    show_picture(code)


@exercise.command()
def proof(
    name: Annotated[str | None, argument("A proof; without it, all are listed.", metavar="NAME")] = None,
    format: Annotated[
        Format, option(f"Output format: {', '.join(Format)}.", "--format", "-f", metavar="FORMAT")
    ] = Format.terminal,
    json: Json = False,
) -> None:
    """Print a proof in letters, after verifying every step of it for any size."""
    from clearhead.course import proofs

    if name is None:
        titles = proofs.bundled_proofs()
        document = [{"name": key, "title": title} for key, title in titles.items()]
        return emit(json or format is Format.json, document, table(("proof", "title"), titles.items()))
    verified = proofs.prove(name)
    if json or format is Format.json:
        show_json(proofs.to_dict(verified))
    elif format is Format.terminal:
        show_picture(proofs.terminal(verified, max(40, min(console.width, 100))))
    else:
        show_picture(getattr(proofs, format)(verified))


@exercise.command()
def new(
    file: Annotated[Path, argument("The problem file to write (.toml).", metavar="FILE")],
    problem_type: Annotated[
        str | None, argument("The problem type; without it, one template of each type.", metavar="TYPE")
    ] = None,
) -> None:
    """Write a commented template of a problem file."""
    from clearhead.course.exercises import schema

    schema.write_template(file, problem_type)
    print_line(f"wrote {file}; solve it with: clearhead exercise solve {file}")


@exercise.command("schema")
def show_schema(
    problem_types: Annotated[list[str] | None, argument("Problem types; all if none is named.", metavar="TYPE")] = None,
    json: Json = False,
) -> None:
    """List the keys of a problem file."""
    from clearhead.course.exercises import schema

    types = [schema.require_type(word) for word in problem_types] if problem_types else [None, *schema.PROBLEM_TYPES]
    schemas = {problem_type or "every type": schema.schema(problem_type) for problem_type in types}
    if json:
        document = {
            problem_type: {"is": description, "keys": [vars(key) for key in keys]}
            for problem_type, (description, keys) in schemas.items()
        }
        return show_json(document)
    for problem_type, (description, keys) in schemas.items():
        rows = [(key.name, "optional" if key.optional else "", key.description, key.example) for key in keys]
        title = f"{problem_type}: {description}"
        console.print(table(("key", "", "description", "example"), rows, title=title))
        console.print()


def _reject_free_text(name: str, files: list[Path]) -> None:
    """Raise ConfigError for questions of course documents and for files of prose."""
    from clearhead.course.sources import SLUGS

    prose = [file.name for file in files if file.suffix.lower() in (".txt", ".md", ".pdf", ".docx")]
    if name in SLUGS or prose:
        document = name if name in SLUGS else "NAME"
        subject = prose[0] if prose else f"an answer to {name}"
        raise ConfigError(
            f"{subject} is free text, which is not graded; mark it by the scheme that "
            f"`clearhead course show {document} QUESTION` prints"
        )


def _worksheet(name: str, seed: int | None) -> ch.course.exercises.Worksheet:
    return ch.course.exercises.solve(name if seed is None else ch.course.exercises.variant(name, seed))


def _grade_program(name: str, file: Path, json: bool) -> None:
    from clearhead.course.exercises import starter_code

    graded = starter_code.grade_program(name, file)
    if json:
        show_json(graded.to_dict())
    else:
        show_picture(str(graded))
    raise typer.Exit(0 if graded.is_right else 1)


def _grade_answers(worksheet: ch.course.exercises.Worksheet, files: list[Path], json: bool) -> None:
    """Print one student's grades cell by cell, or a table of a class."""
    grades = ch.course.exercises.grade_class(worksheet, files)
    student = grades.students[0] if len(files) == len(grades.students) == 1 else None
    if student is None and len(files) == 1 and grades.unread:
        ch.course.exercises.grade_file(worksheet, files[0])  # raises with the reason
    if json:
        show_json((student or grades).to_dict())
    elif student is not None:
        show_picture(str(student))
    else:
        headings = [f"{key}/{cells}" for key, cells in zip(grades.keys, grades.cells, strict=True)]
        columns = ["student", *headings, f"all/{sum(grades.cells)}", ""]
        console.print(table(columns, grades.rows, title=worksheet.title))
        for count, key, because in grades.mistakes:
            print_wrapped(f"{count} student{'' if count == 1 else 's'}, {key}: {because}")
        for name, why in grades.unread:
            print_wrapped(f"not graded: {name}: {why}")
    raise typer.Exit(0 if grades.is_right else 1)
