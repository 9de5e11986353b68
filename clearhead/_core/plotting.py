"""Figures drawn with matplotlib to PNG, SVG or PDF without a display."""

from __future__ import annotations

import hashlib
import io
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead._core.atomic_io import write_atomically
from clearhead.errors import StorageError, optional_dependency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given size in inches, without a window or global state."""
    with optional_dependency("drawing needs matplotlib: pip install 'clearhead[plot]'"):
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


def render_inline_svg(figure: Figure, title: str) -> str:
    """Return a figure as an SVG element that can be part of a page with other figures.

    Args:
        figure: The figure.
        title: A description for readers of screens.

    Returns:
        The element without prolog and metadata. Its ids start with a hash of its content, so that they are unique.
    """
    text = render_figure(figure, ".svg").decode("utf-8")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)  # would style the whole page
    text = text.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    prefix = "f" + hashlib.sha256((title + text).encode()).hexdigest()[:8]
    used = set(re.findall(r"(?:href=\"|url\()#([^\")]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in used else "", text)
    text = re.sub(r"((?:href=\"|url\()#)", rf"\g<1>{prefix}-", text)
    end = text.index(">")
    return f'{text[:end]} role="img"><title>{escape(title)}</title>{text[end + 1 :]}'.rstrip()


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to a file atomically."""
    try:
        write_atomically(path, render_figure(figure, path.suffix or ".png"))
    except ValueError as error:
        raise StorageError(f"cannot draw to {path}: {error}; use .png or .svg") from error
    return path
