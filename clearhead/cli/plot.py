"""`clearhead plot`: draw figures as PNG or SVG, depending on the file name."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.options import Theme, ThemeName, argument, option
from clearhead.cli.output import FIGURES, print_line, writing

plot = typer.Typer(help="Draw a figure to a PNG or SVG file.", no_args_is_help=True)
app.add_typer(plot, name="plot")

Out = Annotated[Path, option("Output file: .png or .svg.", "--out", "-o")]


@plot.command()
def schedule(
    lr_max: Annotated[float, option("Maximum learning rate.")] = 0.001,
    warmup: Annotated[int, option("Number of warm-up steps.", min=0)] = 4000,
    total: Annotated[int, option("Total number of steps.", min=1)] = 100_000,
    out: Out = Path("schedule.png"),
    theme: Theme = ThemeName.light,
) -> None:
    """Plot a learning-rate schedule: linear warm-up, then cosine decay (CENG 403, Transformers and Attention, Q7a)."""
    from clearhead._core.plotting import plot_style
    from clearhead.training import WarmupCosine, draw_schedule

    with writing(out, FIGURES), plot_style(theme.value):
        draw_schedule(WarmupCosine(lr_max, warmup, total), total, out)
    print_line(f"written to {out}")


@plot.command("run")
def run_(
    folder: Annotated[Path, argument("Run folder.")],
    out: Annotated[Path | None, option("Output file. Default: loss.png in the run folder.", "--out", "-o")] = None,
    theme: Theme = ThemeName.light,
) -> None:
    """Plot loss and learning rate of a run."""
    from clearhead._core.plotting import plot_style
    from clearhead.training import draw_run

    checked = writing(out or folder / "loss.png", FIGURES) if folder.is_dir() else nullcontext()
    with checked, plot_style(theme.value):
        path = draw_run(folder, out)
    print_line(f"written to {path}")


@plot.command()
def positions(
    length: Annotated[int, option("Number of positions.", min=1, max=1 << 16)] = 100,
    width: Annotated[int, option("Model dimension.", min=2, max=1 << 16)] = 128,
    out: Out = Path("positions.png"),
    theme: Theme = ThemeName.light,
) -> None:
    """Plot sinusoidal positions and their similarity by distance."""
    from clearhead._core.plotting import new_figure, plot_style, save_figure
    from clearhead.nn.positions import Sinusoidal

    with writing(out, FIGURES), plot_style(theme.value):
        waves = Sinusoidal().table(length, width)
        figure = new_figure(10, 4)
        table_axes, similarity_axes = figure.subplots(1, 2)
        image = table_axes.imshow(waves.T.numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, origin="lower")
        table_axes.set(xlabel="position", ylabel="feature (sin, cos, sin, …)", title="Sinusoidal positions")
        figure.colorbar(image, ax=table_axes)
        similarity_axes.plot((waves @ waves[0]).numpy() / (width / 2))
        similarity_axes.set(xlabel="distance", ylabel="PE(p) · PE(p + distance), scaled", title="The same for every p")
        similarity_axes.grid(alpha=0.3)
        save_figure(figure, out)
    print_line(f"written to {out}")
