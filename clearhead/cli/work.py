"""`clearhead work`: every step of a small example, in exact numbers; blank sheets, and marks for answers."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import clearhead as ch
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import answer, console, say, show_json, show_picture, table, tell

Format = StrEnum("Format", "terminal markdown latex html json")  # how a sheet is written


@app.command()
def work(
    problem: Annotated[
        str | None,
        argument("A problem file (.toml) or the name of a shipped one; none lists them. Or new, schema, skeleton."),
    ] = None,
    files: Annotated[
        list[str] | None, argument("With --check: further answer files; or what new, schema, skeleton take.")
    ] = None,
    format: Annotated[
        Format, option(f"How the sheet is written: {', '.join(Format)}.", "--format", "-f", metavar="FORMAT")
    ] = Format.terminal,
    digits: Annotated[int, option("Decimals after the point.", min=1, max=50)] = 4,
    seed: Annotated[
        int | None, option("New numbers of the same difficulty; the same seed, the same sheet.", min=0)
    ] = None,
    blank: Annotated[bool, option("The question sheet, with empty matrices.", "--blank")] = False,
    check: Annotated[
        Path | None,
        option("Mark the answers in this file (.toml, .json, .csv) or folder; status 1 if a cell is wrong."),
    ] = None,
    json: Json = False,
) -> None:
    """Work a small problem step by step, in exact numbers beside decimals.

    Each step has a name in square brackets: an answer file gives them as name = number, list or matrix, where a cell
    may be 3, "1/3", 0.3333 or "e^3/(2*e^3 + 4)". A cell that follows from a wrong one before it has its credit (→), and
    known mistakes are named. Several files (--check answers/*.json) give a table of marks.

    clearhead work new my.toml [KIND] writes a commented template of a problem of your own, clearhead work schema [KIND]
    says what such a file may hold, and clearhead work skeleton NAME prints a program to fill in, which
    clearhead work skeleton NAME --check mine.py runs and grades."""
    from clearhead.work import show

    if json:
        format = Format.json

    if problem in _WORDS:
        return _WORDS[problem](files or [], check, json)
    if files and check is None:
        raise typer.BadParameter(f"{files[0]!r} is left over; answer files need --check")
    if problem is None:
        document = [{"name": name, "title": title} for name, title in ch.work.shipped().items()]
        return answer(format is Format.json, document, table(("problem", "what it works"), ch.work.shipped().items()))
    solved = ch.work.solve(problem if seed is None else ch.work.variant(problem, seed))
    if check is not None:
        _mark(solved, ch.work.answer_files([check, *map(Path, files or [])]), format)
    style = show.Style(digits, blank, max(24, min(console.width, 120)))
    if format is Format.json:
        show_json(show.to_dict(solved, style))
    else:
        show_picture(getattr(show, format)(solved, style))
    raise typer.Exit(0 if solved.agrees else 1)


def _new(words: list[str], check: Path | None, json: bool) -> None:
    from clearhead.work import schema

    if not 1 <= len(words) <= 2 or check:
        raise typer.BadParameter("write clearhead work new FILE.toml, and perhaps a kind after it")
    schema.write_template(Path(words[0]), *words[1:])
    tell(f"{words[0]} is written; work it with: clearhead work {words[0]}")


def _schema(words: list[str], check: Path | None, json: bool) -> None:
    from clearhead.work import schema

    kinds = [None, *schema.KINDS] if not words else [schema.known(word) for word in words]
    found = {kind or "every kind": schema.schema(kind) for kind in kinds}
    if json:
        document = {kind: {"is": says, "keys": [vars(key) for key in keys]} for kind, (says, keys) in found.items()}
        return show_json(document)
    for kind, (says, keys) in found.items():
        rows = [(key.name, "optional" if key.optional else "", key.says, key.example) for key in keys]
        console.print(table(("key", "", "what it is", "example"), rows, title=f"{kind}: {says}"))
        console.print()


def _skeleton(words: list[str], check: Path | None, json: bool) -> None:
    from clearhead.work import skeleton

    if not words:
        return console.print(table(("skeleton", "what is to be filled in"), skeleton.skeletons().items()))
    if check is None:
        return show_picture(skeleton.skeleton(words[0]))
    graded = skeleton.grade(words[0], check)
    if json:
        show_json(graded.to_dict())
    else:
        show_picture(str(graded))
    raise typer.Exit(0 if graded.is_right else 1)


_WORDS: dict[str, Callable[[list[str], Path | None, bool], None]] = {
    "new": _new, "schema": _schema, "skeleton": _skeleton
}  # fmt: skip


def _mark(solved: ch.work.Work, answers: list[Path], format: Format) -> NoReturn:
    """One student's marks cell by cell, or a table of a class; status 1 where something is wrong."""
    marks = ch.work.mark_class(solved, answers)
    one = marks.students[0] if len(answers) == len(marks.students) == 1 else None
    if one is None and len(answers) == 1 and marks.unread:
        ch.work.mark(solved, answers[0])  # raises, and says why
    if format is Format.json:
        show_json((one or marks).to_dict())
    elif one is not None:
        show_picture(str(one))
    else:
        heads = [f"{key}/{cells}" for key, cells in zip(marks.keys, marks.cells, strict=True)]
        console.print(table(["student", *heads, f"all/{sum(marks.cells)}", ""], marks.rows, title=solved.title))
        for count, key, because in marks.mistakes:
            say(f"{count} student{'' if count == 1 else 's'}, {key}: {because}")
        for name, why in marks.unread:
            say(f"not marked: {name}: {why}")
    raise typer.Exit(0 if marks.is_right else 1)
