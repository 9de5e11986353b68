"""`clearhead plot`: draw figures as PNG or SVG, depending on the file name."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option, resolve_device
from clearhead.cli.output import FIGURES, emit, print_line, progress, table, writing

plot = typer.Typer(help="Draw a figure to a PNG or SVG file.", no_args_is_help=True)
app.add_typer(plot, name="plot")

Out = Annotated[Path, option("Output file: .png or .svg.", "--out", "-o")]


@plot.command()
def growth(
    out: Annotated[Path, option("Output file: .png, .svg or .pdf.", "--out", "-o")] = Path("growth.png"),
    d: Annotated[int, option("Model dimension.", "--d")] = 64,
    k: Annotated[int, option("Kernel size of the convolution.", "--k")] = 3,
    longest: Annotated[int, option("Maximum length; the others are powers of two.", min=1, max=1 << 24)] = 2048,
    batch: Annotated[int, option("Batch size.", "--batch", "-b")] = 1,
    device: Annotated[str, option("Device to measure on: cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Plot the time of self-attention, recurrence and convolution by length: predicted (lines), measured (dots)."""
    from clearhead.bench.growth import growth as measure_growth
    from clearhead.bench.growth import lengths, plot_growth

    device = resolve_device(device)
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
    emit(json, {**found.to_dict(), "picture": str(path)}, shown, f"picture written to {path}")


@plot.command()
def schedule(
    lr_max: Annotated[float, option("Maximum learning rate.")] = 0.001,
    warmup: Annotated[int, option("Number of warm-up steps.", min=0)] = 4000,
    total: Annotated[int, option("Total number of steps.", min=1)] = 100_000,
    out: Out = Path("schedule.png"),
) -> None:
    """Plot a learning-rate schedule: linear warm-up, then cosine decay (CENG 403, Transformers and Attention, Q7a)."""
    from clearhead.training import WarmupCosine, draw_schedule

    with writing(out, FIGURES):
        draw_schedule(WarmupCosine(lr_max, warmup, total), total, out)
    print_line(f"written to {out}")


@plot.command("run")
def run_(
    folder: Annotated[Path, argument("Run folder.")],
    out: Annotated[Path | None, option("Output file. Default: loss.png in the run folder.", "--out", "-o")] = None,
) -> None:
    """Plot loss and learning rate of a run."""
    from clearhead.training import draw_run

    with writing(out or folder / "loss.png", FIGURES) if folder.is_dir() else nullcontext():
        path = draw_run(folder, out)
    print_line(f"written to {path}")


@plot.command()
def positions(
    length: Annotated[int, option("Number of positions.", min=1, max=1 << 16)] = 100,
    width: Annotated[int, option("Model dimension.", min=2, max=1 << 16)] = 128,
    out: Out = Path("positions.png"),
) -> None:
    """Plot sinusoidal positions and their similarity by distance."""
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
    print_line(f"written to {out}")


@plot.command()
def sparse(
    results: Annotated[Path, argument("Results of `clearhead bench sparse`.")] = Path("sparse.json"),
    out: Out = Path("sparse.png"),
) -> None:
    """Plot measured time against density of masks."""
    from clearhead.bench.sparse import draw_sparse

    with writing(out, FIGURES):
        path = draw_sparse(results, out)
    print_line(f"written to {path}")


@plot.command()
def study(
    results: Annotated[Path, argument("Results of `clearhead bench study`.")],
    out: Annotated[
        Path | None, option("Output file: .png or .svg. Default: the results' name with .png.", "--out", "-o")
    ] = None,
) -> None:
    """Plot a study: one panel per value of its first factor, one line per value of the second, a band over seeds."""
    from clearhead.bench.studies import draw_study, read

    record, out = read(results), out or results.with_suffix(".png")
    with writing(out, FIGURES):
        path = draw_study(record, out)
    print_line(f"written to {path}")
