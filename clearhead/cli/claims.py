"""`clearhead claims`: the ledger of textbook statements, each tried by code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, no_type_check

import typer
from rich.text import Text

from clearhead.cli.app import app
from clearhead.cli.output import Json, console, show_json, show_picture, table, writing

if TYPE_CHECKING:
    from clearhead.claims import Claim, Outcome

claims = typer.Typer(help="Statements of courses and exams about attention, each tried by code, with a verdict.")
app.add_typer(claims, name="claims")

Seed = Annotated[int, typer.Option(help="Where chance begins; the same seed gives the same outcome.", min=0)]

_COLOUR = {"holds": "green", "holds when": "yellow", "does not hold": "red"}


# What typer hands over is a parent class of the one that it wants to see in the signature.
@claims.callback(invoke_without_command=True)
@no_type_check
def overview(context: typer.Context) -> None:
    """All statements by document, with verdict and the figure that decides. Trying them all takes about 15 seconds."""
    if context.invoked_subcommand is None:
        _print_tables(_run([], 0))


@claims.command()
def run(
    ids: Annotated[list[str] | None, typer.Argument(help="Which claims; all if none is named.", metavar="ID")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Try claims and print their verdicts."""
    outcomes = _run(ids or [], seed)
    if json:
        show_json({"claims": [o.to_dict() for o in outcomes]})
    else:
        _print_tables(outcomes)


@claims.command()
def show(
    id: Annotated[str, typer.Argument(help="The claim.", metavar="ID")],
    seed: Seed = 0,
    svg: Annotated[Path | None, typer.Option(help="Also write its drawing to this SVG file.")] = None,
    json: Json = False,
) -> None:
    """One claim: the statement, how it was tried, the evidence and its drawing."""
    from clearhead.claims import ClaimError

    (o,) = _run([id], seed)
    if svg is not None:
        if o.figure is None:
            raise ClaimError(f"the claim {id!r} has no drawing to write to {svg}: leave out --svg")
        with writing(svg):
            svg.write_text(o.figure.svg(), encoding="utf-8")
    if json:
        show_json(o.to_dict())
        return
    _print_one(o)


@claims.command()
def report(
    out: Annotated[Path, typer.Argument(help="The HTML file to write.")],
    seed: Seed = 0,
) -> None:
    """Write all claims as one HTML page that needs no network."""
    from clearhead.claims import report as page

    with writing(out):
        outcomes = _run([], seed)
        out.write_text(page(outcomes, seed), encoding="utf-8")
    console.print(f"{len(outcomes)} claims written to {out}", markup=False, soft_wrap=True)


def _run(ids: list[str], seed: int) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import track

    from clearhead.claims import find

    chosen: list[Claim] = find(ids)
    errors = Console(stderr=True)  # progress is not part of the answer
    return [
        c.run(seed) for c in track(chosen, "trying", console=errors, transient=True, disable=not errors.is_terminal)
    ]


def _print_tables(outcomes: list[Outcome]) -> None:
    from clearhead.claims import DOCUMENTS

    for source in DOCUMENTS:
        found = [o for o in outcomes if o.claim.source == source]
        if not found:
            continue
        console.print(Text(f"\n{source}", style="bold"))
        rows = table(["claim", "place", "verdict", "figure"], [])
        for o in found:
            headline = o.headline if len(o.headline) <= 90 else o.headline[:89] + "…"
            rows.add_row(o.claim.id, o.claim.place, Text(o.verdict, style=_COLOUR[o.verdict]), Text(headline))
        console.print(rows)
    counts = {v: sum(o.verdict == v for o in outcomes) for v in _COLOUR}
    seconds = sum(o.seconds for o in outcomes)
    summary = ", ".join(f"{n} {v}" for v, n in counts.items())
    console.print(f"\n{len(outcomes)} claims: {summary}; {seconds:.0f} s", markup=False)


def _print_one(o: Outcome) -> None:
    c = o.claim
    console.print(Text(c.says, style="bold"))
    console.print(f"{c.source}, {c.place}", markup=False)
    console.print(Text(o.verdict, style=_COLOUR[o.verdict]))
    details = (
        ("condition", c.when if o.verdict == "holds when" else ""),
        ("with it", o.example_for),
        ("without it", o.example_against),
        ("counter-example", o.counter_example),
        ("correct", o.correct),
        ("method", c.method),
    )
    for name, text in details:
        if text:
            console.print(f"{name}: {text}", markup=False, soft_wrap=True)
    console.print("evidence:", markup=False)
    for line in o.evidence:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if o.figure is not None:
        console.print()
        show_picture(o.figure.text())
