"""`clearhead plot growth`: predicted and measured time of three kinds of layers against the length."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.output import FIGURES, Json, console, device_here, show_json, table, writing


def growth(
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write: png, svg or pdf.")] = Path(
        "growth.png"
    ),
    d: Annotated[int, typer.Option("--d", help="Width of the layers.")] = 64,
    k: Annotated[int, typer.Option("--k", help="Kernel of the convolution.")] = 3,
    longest: Annotated[int, typer.Option(help="Greatest length; shorter ones are powers of two.")] = 2048,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences at a time.")] = 1,
    device: Annotated[str, typer.Option(help="Where to measure: cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """How self-attention, recurrence and convolution grow with the length: lines are predicted, dots are measured."""
    from rich.progress import Progress

    from clearhead.bench.growth import growth as measure_growth
    from clearhead.bench.growth import lengths, plot_growth

    device = device_here(device)
    with writing(out, FIGURES):
        steps = lengths(min(32, longest), longest)
        with Progress(console=console, transient=True, disable=json) as progress:
            task = progress.add_task("measuring", total=3 * len(steps))
            found = measure_growth(d, steps, k=k, batch=batch, device=device, on_point=lambda _: progress.advance(task))
        path = plot_growth(found, out)
    if json:
        show_json({**found.to_dict(), "picture": str(path)})
        return
    rows = [
        (
            p.layer,
            f"{p.n:,}",
            f"{p.operations:,}",
            f"{1e3 * p.predicted:.3f}",
            f"{1e3 * (p.measured or 0.0):.3f}",
        )
        for p in found.points
    ]
    console.print(table(("layer", "n", "operations", "predicted, ms", "measured, ms"), rows))
    console.print(f"picture written to {path}", markup=False, soft_wrap=True)
