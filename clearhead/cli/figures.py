"""Figures that belong to no other room."""

from __future__ import annotations

from pathlib import Path

from clearhead.errors import MissingDependencyError
from clearhead.positions import Sinusoidal


def draw_positions(length: int, width: int, path: Path) -> None:
    """The sinusoidal table as a picture, and the dot product of two positions against their distance."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("figures need matplotlib: pip install matplotlib") from error
    table = Sinusoidal().table(length, width)
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    image = left.imshow(table.T.numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, origin="lower")
    left.set(xlabel="position", ylabel="feature (sin, cos, sin, …)", title="Sinusoidal positions")
    figure.colorbar(image, ax=left)
    right.plot((table @ table[0]).numpy() / (width / 2))
    right.set(xlabel="distance", ylabel="PE(p) · PE(p + distance), scaled", title="The same for every p")
    right.grid(alpha=0.3)
    figure.savefig(path)
