"""Plots of a training run and of a learning-rate schedule."""

from __future__ import annotations

from pathlib import Path

from clearhead._core.plotting import new_figure, plot_style, save_figure
from clearhead.errors import StorageError
from clearhead.training.callbacks import read_log
from clearhead.training.schedules import LRSchedule


@plot_style()
def draw_run(run: Path | str, path: Path | str | None = None) -> Path:
    """Plot training and validation loss and the learning rate of a run.

    Args:
        run: Folder of the run.
        path: Image file to write; by default `loss.png` in the folder.

    Returns:
        The path of the image.
    """
    run = Path(run)
    if not (rows := read_log(run)):
        raise StorageError(f"{run} has an empty log; there is nothing to draw yet")

    training = [row for row in rows if row["kind"] == "train"]
    validation = [row for row in rows if row["kind"] == "valid"]
    figure = new_figure(7.0, 5.5)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    losses.plot([row["step"] for row in training], [row["loss"] for row in training], label="training", linewidth=1)
    if validation:
        steps = [row["step"] for row in validation]
        losses.plot(steps, [row["loss"] for row in validation], label="validation", marker="o", markersize=3)
    losses.set_ylabel("loss (nats per label)")
    losses.legend(frameon=False)
    rates.plot([row["step"] for row in training], [row["lr"] for row in training], color="C2", linewidth=1)
    rates.set(xlabel="step", ylabel="learning rate")
    return save_figure(figure, run / "loss.png" if path is None else Path(path))


@plot_style()
def draw_schedule(schedule: LRSchedule, total_steps: int, path: Path | str) -> Path:
    """Plot the learning rate of a schedule and return the path of the image.

    Args:
        schedule: The schedule.
        total_steps: Number of steps of the run.
        path: File of the image; its suffix determines the format.

    Returns:
        The path of the image.
    """
    figure = new_figure(7.0, 3.5)
    axes = figure.subplots()
    stride = max(1, total_steps // 2000)
    steps = sorted({*range(0, total_steps + 1, stride), total_steps, getattr(schedule, "warmup_steps", 0)})
    axes.plot(steps, [schedule(step) for step in steps])
    axes.set(xlabel="step", ylabel="learning rate")
    axes.set_title(str(schedule), fontsize=9)
    return save_figure(figure, Path(path))
