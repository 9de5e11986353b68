"""`clearhead plot`: figures as PNG or SVG, whichever the file's name says."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, device_here, option
from clearhead.cli.output import FIGURES, answer, progress, table, tell, writing

plot = typer.Typer(help="Draw a figure to a PNG or SVG file.", no_args_is_help=True)
app.add_typer(plot, name="plot")

Out = Annotated[Path, option("The file: .png or .svg.", "--out", "-o")]


@plot.command()
def growth(
    out: Annotated[Path, option("The picture to write: png, svg or pdf.", "--out", "-o")] = Path("growth.png"),
    d: Annotated[int, option("Width of the layers.", "--d")] = 64,
    k: Annotated[int, option("Kernel of the convolution.", "--k")] = 3,
    longest: Annotated[int, option("Greatest length; shorter ones are powers of two.", min=1, max=1 << 24)] = 2048,
    batch: Annotated[int, option("Sequences at a time.", "--batch", "-b")] = 1,
    device: Annotated[str, option("Where to measure: cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """How self-attention, recurrence and convolution grow with the length: lines are predicted, dots are measured."""
    from clearhead.bench.growth import growth as measure_growth
    from clearhead.bench.growth import lengths, plot_growth

    device = device_here(device)
    with writing(out, FIGURES):
        steps = lengths(min(32, longest), longest)
        with progress("measuring", hidden=json) as told:
            done = count(1)
            how: dict[str, Any] = {"k": k, "batch": batch, "device": device}
            found = measure_growth(d, steps, **how, on_point=lambda _: told(next(done), 3 * len(steps)))
        path = plot_growth(found, out)
    rows = [
        (p.layer, f"{p.n:,}", f"{p.flops:,}", f"{1e3 * p.predicted:.3f}", f"{1e3 * (p.measured or 0.0):.3f}")
        for p in found.points
    ]
    shown = table(("layer", "n", "FLOPs", "predicted, ms", "measured, ms"), rows)
    answer(json, {**found.to_dict(), "picture": str(path)}, shown, f"picture written to {path}")


@plot.command()
def schedule(
    lr_max: Annotated[float, option("The highest learning rate.")] = 0.001,
    warmup: Annotated[int, option("Steps of warm-up.", min=0)] = 4000,
    total: Annotated[int, option("Steps in all.", min=1)] = 100_000,
    out: Out = Path("schedule.png"),
) -> None:
    """The learning rate over a run: linear warm-up, then cosine decay (CENG 403, Transformers and Attention, Q7a)."""
    from clearhead.training import WarmupCosine, draw_schedule

    with writing(out, FIGURES):
        draw_schedule(WarmupCosine(lr_max, warmup, total), total, out)
    tell(f"drawn to {out}")


@plot.command("run")
def run_(
    folder: Annotated[Path, argument("The folder of a run.")],
    out: Annotated[Path | None, option("The file; by default loss.png in the run.", "--out", "-o")] = None,
) -> None:
    """Loss and learning rate of a run, from its log."""
    from clearhead.training import draw_run

    with writing(out or folder / "loss.png", FIGURES) if folder.is_dir() else nullcontext():
        path = draw_run(folder, out)
    tell(f"drawn to {path}")


@plot.command()
def positions(
    length: Annotated[int, option("How many positions.", min=1, max=1 << 16)] = 100,
    width: Annotated[int, option("The model's width.", min=2, max=1 << 16)] = 128,
    out: Out = Path("positions.png"),
) -> None:
    """Sinusoidal positions, and how alike two positions are by their distance."""
    from clearhead.positions import Sinusoidal
    from clearhead.training.figure import new_figure, save_figure

    with writing(out, FIGURES):
        waves = Sinusoidal().table(length, width)
        figure = new_figure(10, 4)
        left, right = figure.subplots(1, 2)
        image = left.imshow(waves.T.numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, origin="lower")
        left.set(xlabel="position", ylabel="feature (sin, cos, sin, …)", title="Sinusoidal positions")
        figure.colorbar(image, ax=left)
        right.plot((waves @ waves[0]).numpy() / (width / 2))
        right.set(xlabel="distance", ylabel="PE(p) · PE(p + distance), scaled", title="The same for every p")
        right.grid(alpha=0.3)
        save_figure(figure, out)
    tell(f"drawn to {out}")


@plot.command()
def sparse(
    results: Annotated[Path, argument("The file that `clearhead bench sparse` wrote.")] = Path("sparse.json"),
    out: Out = Path("sparse.png"),
) -> None:
    """What masks cost against what they allow, from measured results."""
    from clearhead.bench.sparse import draw_sparse

    with writing(out, FIGURES):
        path = draw_sparse(results, out)
    tell(f"drawn to {path}")


@plot.command()
def study(
    results: Annotated[Path, argument("The file that `clearhead bench study` wrote.")],
    out: Annotated[
        Path | None, option("The file: .png or .svg; by default beside the results, as .png.", "--out", "-o")
    ] = None,
) -> None:
    """A study: a panel for each of its first choices, a line for each of the second, a band over the seeds."""
    from clearhead.bench.studies import draw_study, read

    record, out = read(results), out or results.with_suffix(".png")
    with writing(out, FIGURES):
        path = draw_study(record, out)
    tell(f"drawn to {path}")
