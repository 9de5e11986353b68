"""Figures that belong to no other room."""

from __future__ import annotations

from pathlib import Path

from clearhead.positions import Sinusoidal
from clearhead.training.figure import new_figure, save_figure


def draw_positions(length: int, width: int, path: Path) -> None:
    """The sinusoidal table as a picture, and the dot product of two positions against their distance."""
    table = Sinusoidal().table(length, width)
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    image = left.imshow(table.T.numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, origin="lower")
    left.set(xlabel="position", ylabel="feature (sin, cos, sin, …)", title="Sinusoidal positions")
    figure.colorbar(image, ax=left)
    right.plot((table @ table[0]).numpy() / (width / 2))
    right.set(xlabel="distance", ylabel="PE(p) · PE(p + distance), scaled", title="The same for every p")
    right.grid(alpha=0.3)
    save_figure(figure, path)
