"""Figures drawn with matplotlib to PNG, SVG or PDF without a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead._core.atomic_io import write_atomically
from clearhead.errors import StorageError, optional_dependency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given size in inches, without a window or global state."""
    with optional_dependency("drawing needs matplotlib: pip install matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def render_figure(figure: Figure, ending: str, *, dpi: int = 120, svg_fonts: str = "none") -> bytes:
    """Return the bytes of a .png, .svg or .pdf file, reproducibly.

    `svg_fonts` is "none" (text stays text) or "path" (glyphs are drawn, and look the same on every machine)."""
    import matplotlib

    # By default, an SVG contains random ids and the date.
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "clearhead", "svg.fonttype": svg_fonts}):
        figure.savefig(buffer, dpi=dpi, format=ending[1:].lower(), metadata=dates.get(ending.lower()))
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to a file atomically."""
    try:
        write_atomically(path, render_figure(figure, path.suffix or ".png"))
    except ValueError as error:
        raise StorageError(f"cannot draw to {path}: {error}; use .png or .svg") from error
    return path
