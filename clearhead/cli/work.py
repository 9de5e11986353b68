"""`clearhead work`: every step of a small example, in exact numbers; blank sheets, and marks for answers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import console, show_json, show_picture, table

if TYPE_CHECKING:
    from clearhead.work import Work


class Format(StrEnum):
    """How a sheet is written."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    html = "html"
    json = "json"


@app.command()
def work(
    problem: Annotated[
        str | None,
        typer.Argument(help="A problem file (.toml) or the name of a shipped one; none lists them."),
    ] = None,
    format: Annotated[Format, typer.Option("--format", "-f", help="How the sheet is written.")] = Format.terminal,
    digits: Annotated[int, typer.Option(help="Decimals after the point.", min=1, max=50)] = 4,
    seed: Annotated[
        int | None, typer.Option(help="New numbers of the same difficulty; the same seed, the same sheet.", min=0)
    ] = None,
    blank: Annotated[bool, typer.Option("--blank", help="The question sheet, with empty matrices.")] = False,
    check: Annotated[
        Path | None, typer.Option(help="Mark the answers in this TOML file; status 1 if a cell is wrong.")
    ] = None,
) -> None:
    """Work a small problem step by step, in exact numbers beside decimals.

    Each step has a name in square brackets: an answer file gives them as name = number, list or matrix, where a cell
    may be 3, "1/3", 0.3333 or "e^3/(2*e^3 + 4)"."""
    from clearhead.work import mark, shipped, solve, variant

    if problem is None:
        if format is Format.json:
            show_json([{"name": name, "title": title} for name, title in shipped().items()])
        else:
            console.print(table(("problem", "what it works"), shipped().items()))
        return
    solved = solve(problem if seed is None else variant(problem, seed))
    if check is not None:
        marks = mark(solved, check)
        if format is Format.json:
            show_json(marks.to_dict())
        else:
            show_picture(str(marks))
        raise typer.Exit(0 if marks.is_right else 1)
    _show(solved, format, digits, blank)
    raise typer.Exit(0 if solved.agrees else 1)


def _show(solved: Work, format: Format, digits: int, blank: bool) -> None:
    from clearhead.work import show

    style = show.Style(digits, blank)
    if format is Format.json:
        show_json(show.to_dict(solved, style))
        return
    ways = {
        Format.terminal: show.terminal,
        Format.markdown: show.markdown,
        Format.latex: show.latex,
        Format.html: show.html,
    }
    show_picture(ways[format](solved, style))
