"""Pictures of a run and of a schedule, drawn with matplotlib to PNG or SVG without a screen."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from clearhead._core.atomic_io import write_atomically
from clearhead.errors import StorageError, needing


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches: no window, no global state."""
    with needing("drawing needs matplotlib: pip install matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def drawn(figure: Any, ending: str, *, dpi: int = 120, letters: str = "none") -> bytes:
    """A figure as a .png, .svg or .pdf file has it: the same for the same figure. In an SVG, letters stay text, or are
    drawn ("path") and look alike on every machine."""
    import matplotlib

    # Without a salt and with a date, an SVG holds random names and when it was made.
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    made = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "clearhead", "svg.fonttype": letters}):
        figure.savefig(made, dpi=dpi, format=ending[1:].lower(), metadata=dates.get(ending.lower()))
    return made.getvalue()


def save_figure(figure: Any, path: Path) -> Path:
    """Draws to a file, whole or not at all."""
    try:
        write_atomically(path, drawn(figure, path.suffix or ".png"))
    except ValueError as error:
        raise StorageError(f"cannot draw to {path}: {error}; use .png or .svg") from error
    return path
