"""`clearhead plot`: figures as PNG or SVG, whichever the file's name says."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import FIGURES, console, writing
from clearhead.cli.plot_growth import growth

plot = typer.Typer(help="Draw a figure to a PNG or SVG file.", no_args_is_help=True)
app.add_typer(plot, name="plot")
plot.command()(growth)

Out = Annotated[Path, typer.Option("--out", "-o", help="The file: .png or .svg.")]


@plot.command()
def schedule(
    lr_max: Annotated[float, typer.Option(help="The highest learning rate.")] = 0.001,
    warmup: Annotated[int, typer.Option(help="Steps of warm-up.", min=0)] = 4000,
    total: Annotated[int, typer.Option(help="Steps in all.", min=1)] = 100_000,
    out: Out = Path("schedule.png"),
) -> None:
    """The learning rate over a run: linear warm-up, then cosine decay (CENG 403, Transformers and Attention, Q7a)."""
    from clearhead.training import WarmupCosine, draw_schedule

    with writing(out, FIGURES):
        draw_schedule(WarmupCosine(lr_max, warmup, total), total, out)
    _done(out)


@plot.command("run")
def run_(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; by default loss.png in the run.")] = None,
) -> None:
    """Loss and learning rate of a run, from its log."""
    from clearhead.training import draw_run

    with writing(out or folder / "loss.png", FIGURES) if folder.is_dir() else nullcontext():
        path = draw_run(folder, out)
    _done(path)


@plot.command()
def positions(
    length: Annotated[int, typer.Option(help="How many positions.", min=1)] = 100,
    width: Annotated[int, typer.Option(help="The model's width.", min=2)] = 128,
    out: Out = Path("positions.png"),
) -> None:
    """Sinusoidal positions, and how alike two positions are by their distance."""
    from clearhead.cli.figures import draw_positions

    with writing(out, FIGURES):
        draw_positions(length, width, out)
    _done(out)


@plot.command()
def sparse(
    results: Annotated[Path, typer.Argument(help="The file that `clearhead bench sparse` wrote.")] = Path(
        "sparse.json"
    ),
    out: Out = Path("sparse.png"),
) -> None:
    """What masks cost against what they allow, from measured results."""
    from clearhead.bench.sparse_plot import draw_sparse

    with writing(out, FIGURES):
        path = draw_sparse(results, out)
    _done(path)


@plot.command()
def study(
    results: Annotated[Path, typer.Argument(help="The file that `clearhead bench study` wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file: .png or .svg; by default beside the results, as .png.")
    ] = None,
) -> None:
    """A study: a panel for each of its first choices, a line for each of the second, a band over the seeds."""
    from clearhead.bench.studies import read
    from clearhead.bench.studies.figure import draw_study

    record, out = read(results), out or results.with_suffix(".png")
    with writing(out, FIGURES):
        path = draw_study(record, out)
    _done(path)


def _done(path: Path) -> None:
    console.print(f"drawn to {path}", markup=False, soft_wrap=True)
