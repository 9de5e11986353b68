"""`clearhead bench`: measure side by side with a peer, in one run, and print the ratio."""

from __future__ import annotations

from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import Json, console, show_json, table

bench = typer.Typer(
    help="Measure side by side with a peer; what is printed is a ratio of one run.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


@bench.command()
def core(
    repeats: Annotated[int, typer.Option(help="Rounds; each measures both sides once, in turn.", min=1)] = 60,
    json: Json = False,
) -> None:
    """Fused attention against calling torch directly, and multi-head attention against torch.nn's."""
    from rich.progress import Progress

    from clearhead.bench.core import measure
    from clearhead.bench.results import machine, versions

    with Progress(console=console, transient=True, disable=json) as progress:
        task = progress.add_task("measuring", total=None)
        rows = measure(
            repeats, on_round=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if json:
        show_json({"machine": machine(), "versions": versions(), "rows": [row.to_dict() for row in rows]})
        return
    cells = [
        (
            r.name,
            f"{r.ours_ms:.2f}",
            f"{r.peer_ms:.2f}",
            f"{r.ratio:.3f}",
            f"≤ {r.bound:g}",
            "yes" if r.holds else "NO",
        )
        for r in rows
    ]
    console.print(table(("what", "ours, ms", "peer, ms", "ratio", "wanted", "holds"), cells))
