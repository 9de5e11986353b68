"""`clearhead claims`: statements of textbooks and exams, each tested by code."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, no_type_check

import typer
from rich.text import Text

import clearhead as ch
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import console, print_line, print_wrapped, show_json, show_picture, table, writing

claims = typer.Typer(help="Statements of courses and exams about attention, each tested by code, with a verdict.")
app.add_typer(claims, name="claims")

Seed = Annotated[int, option("Random seed.", min=0)]

_COLOR = {"holds": "green", "holds conditionally": "yellow", "does not hold": "red", "misprint": "magenta"}


# typer passes an instance of a parent class of the annotated class.
@claims.callback(invoke_without_command=True)
@no_type_check
def overview(context: typer.Context) -> None:
    """Test all statements (about 15 seconds) and print them by document, with verdict and summary."""
    if context.invoked_subcommand is None:
        _print_tables(_run([], 0))


@claims.command()
def run(
    ids: Annotated[list[str] | None, argument("IDs of claims. Default: all.", metavar="ID")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Test claims and print their verdicts."""
    outcomes = _run(ids or [], seed)
    if json:
        return show_json({"claims": [o.to_dict() for o in outcomes]})
    _print_tables(outcomes)


@claims.command()
def show(
    id: Annotated[str, argument("ID of the claim.", metavar="ID")],
    seed: Seed = 0,
    svg: Annotated[Path | None, option("Also write its figure to this SVG file.")] = None,
    json: Json = False,
) -> None:
    """Test one claim and print its statement, method, evidence and figure."""
    (o,) = _run([id], seed)
    if svg is not None:
        if o.figure is None:
            raise ch.course.claims.ClaimError(f"the claim {id!r} has no figure; leave out --svg")
        with writing(svg, (".svg",)):
            svg.write_text(o.figure.svg(), encoding="utf-8")
    if json:
        return show_json(o.to_dict())
    _print_one(o)


@claims.command()
def report(out: Annotated[Path, argument("Output file (.html).")], seed: Seed = 0) -> None:
    """Write all claims as one HTML page that needs no network."""
    with writing(out):
        outcomes = _run([], seed)
        out.write_text(ch.course.claims.report(outcomes, seed), encoding="utf-8")
    print_line(f"{len(outcomes)} claims written to {out}")


@claims.command()
def coverage(
    document: Annotated[str | None, argument("Name of a course document, such as ceng403-exam. Default: all.")] = None,
    json: Json = False,
) -> None:
    """Count the assertions of the course documents, and how many of them are tested."""
    from clearhead.course.claims.coverage import ACCOUNTED_FOR, REASONS

    lists = [ch.course.claims.ledger_of(document)] if document else ch.course.claims.coverage()
    if json:
        detail = {"list": [asdict(a) for a in lists[0].assertions]} if document else {}
        documents = [ledger.to_dict() for ledger in lists]
        return show_json({"documents": documents, "accounted_for": ACCOUNTED_FOR} | detail)
    for a in lists[0].assertions if document else ():
        print_wrapped(f"{a.location}. {a.statement}")
        print_wrapped(", ".join(a.claims) or f"not tested: {a.reason} ({a.why or REASONS[a.reason]})", indent=2)
    counts = [ledger.to_dict() for ledger in lists]
    names = [name for name in counts[0] if name not in ("document", "source", "share")]
    counts += [{"document": "all"} | {name: sum(d[name] for d in counts) for name in names}] if len(counts) > 1 else []
    rows = []
    for d in counts:
        untested = sum(d[f"untested_{reason}"] for reason in REASONS)
        share = f"{1 - d['unaccounted'] / d['assertions']:.1%}"
        cells = (d["sentences"], d["assertions"], d["tested"], untested, d["unaccounted"], share)
        rows.append((d["document"], *cells))
    console.print(table(("document", "sentences", "assertions", "tested", "untested", "open", "share"), rows))
    print_wrapped(ACCOUNTED_FOR)
    print_wrapped("The share is that of the assertions that are accounted for; the open ones are not.")
    print_wrapped("Reasons, and the number of assertions that are not tested for them:")
    for name, text in REASONS.items():
        print_wrapped(f"{name}, {counts[-1][f'untested_{name}']}: {text}", indent=2)


@claims.command()
def quiz(
    n: Annotated[int, option("Number of statements.", "-n", "--questions", min=1)] = 10,
    document: Annotated[str | None, option("Name of a course document. Default: all.", "--from")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Ask for the verdict of random statements, and compare it with the result of the test."""
    from clearhead.course.claims.quiz import QuizAnswer, parse_verdict, sample_claims
    from clearhead.course.sources import SLUGS

    questions = sample_claims(n, seed, SLUGS.index(ch.course.claims.ledger_of(document).name) if document else None)
    write = (lambda *_, **__: None) if json else console.print

    def ask(number: int, c: ch.course.claims.Claim) -> str | None:
        write(f"\n{number} of {len(questions)}. {c.statement}", style="bold", markup=False)
        write(c.reference, markup=False)
        while True:
            write("1 holds, 2 holds conditionally, 3 does not hold, 4 misprint (q ends): ", end="", markup=False)
            line = sys.stdin.readline()
            if not line or line.strip().lower() in ("q", "quit"):
                return None
            if reader_verdict := parse_verdict(line):
                return reader_verdict
            write(
                f"{line.strip() or 'nothing'!r} is not an answer; enter a number from 1 to 4, or a verdict",
                markup=False,
            )

    answers: list[QuizAnswer] = []
    try:
        for number, claim in enumerate(questions, 1):
            if (reader_verdict := ask(number, claim)) is None:
                break
            answers.append(answer := QuizAnswer(claim.run(seed), reader_verdict))
            if answer.right:
                write(Text("Right.", style="green"))
                continue
            verdict = answer.outcome.verdict
            write(Text(f"No: {verdict}.", style=_COLOR[verdict]))
            for line in answer.because:
                write(f"  {line}", markup=False)
            write(f"  clearhead claims show {answer.outcome.claim.id}", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        write("")
    right = sum(a.right for a in answers)
    write(f"\n{right} of {len(answers)} right (seed {seed})", markup=False)
    if json:
        show_json({"seed": seed, "right": right, "of": len(answers), "answers": [a.to_dict() for a in answers]})


def _run(ids: list[str], seed: int) -> list[ch.course.claims.Outcome]:
    from rich.console import Console
    from rich.progress import track

    errors = Console(stderr=True)  # progress is not part of the output
    questions = track(
        ch.course.claims.find(ids), "testing", console=errors, transient=True, disable=not errors.is_terminal
    )
    return [claim.run(seed) for claim in questions]


def _print_tables(outcomes: list[ch.course.claims.Outcome]) -> None:
    for source in ch.course.claims.DOCUMENTS:
        if not (rows_of_source := [o for o in outcomes if o.claim.source == source]):
            continue
        console.print(Text(f"\n{source}", style="bold"))
        rows = table(["claim", "verdict", "location", "summary"], [])
        for o in rows_of_source:
            rows.add_row(o.claim.id, Text(o.verdict, style=_COLOR[o.verdict]), Text(o.claim.location), Text(o.summary))
        console.print(rows)
    summary = ", ".join(f"{sum(o.verdict == v for o in outcomes)} {v}" for v in _COLOR)
    seconds = sum(o.seconds for o in outcomes)
    console.print(f"\n{len(outcomes)} claims: {summary}; {seconds:.0f} s", markup=False)


def _print_one(o: ch.course.claims.Outcome) -> None:
    c = o.claim
    console.print(Text(c.statement, style="bold"))
    console.print(c.reference, markup=False)
    console.print(Text(o.verdict, style=_COLOR[o.verdict]))
    details = (
        ("condition", c.condition if o.verdict == "holds conditionally" else ""),
        ("with it", o.example_for),
        ("without it", o.example_against),
        ("counter-example", o.counter_example),
        ("intended" if o.verdict == "misprint" else "correction", o.correction),
        ("method", c.method),
    )
    for name, text in details:
        if text:
            print_wrapped(f"{name}: {text}")
    console.print("evidence:", markup=False)
    for line in o.evidence:
        print_wrapped(line, indent=2)
    if o.figure is not None:
        console.print()
        show_picture(o.figure.text(console.width))
