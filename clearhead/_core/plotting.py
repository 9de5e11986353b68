"""Figures drawn with matplotlib to PNG, SVG or PDF without a display, in one style with a light and a dark theme."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead._core.atomic_io import write_atomically
from clearhead.errors import ConfigError, StorageError, optional_dependency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STYLES = Path(__file__).parent / "styles"
"""Folder of the style files, which can also be passed to `matplotlib.style.use`."""

_THEME: ContextVar[str] = ContextVar("theme", default="light")


@dataclass(frozen=True)
class Palette:
    """Colors that a style file cannot name.

    Attributes:
        ink: Text.
        soft: Secondary text.
        heat: Positive values.
        low: Negative values.
        shades: Color stops from zero to the largest value.
        negative: Color stops from the largest negative value to zero.
        missing: Cells without a value.
    """

    ink: str
    soft: str
    heat: str
    low: str
    shades: tuple[str, ...]
    negative: tuple[str, ...]
    missing: str


_PALETTES: dict[str, Palette] = {
    "light": Palette(
        ink="#1c2127",
        soft="#5f6873",
        heat="#1d5fa8",
        low="#e08a4a",
        shades=("#ffffff", "#dde8f4", "#a9c8e6", "#5c98cf", "#1d5fa8", "#0c3566"),
        negative=("#8a3b06", "#e08a4a", "#ffffff"),
        missing="#f0f1f3",
    ),
    "dark": Palette(
        ink="#e8e6e1",
        soft="#9aa3ad",
        heat="#6cb2ee",
        low="#f0a35e",
        shades=("#1a1e24", "#1f3347", "#2a5378", "#3f7fb5", "#6cb2ee", "#cfe6fb"),
        negative=("#ffd9b0", "#c9762f", "#1a1e24"),
        missing="#22272e",
    ),
}


@contextmanager
def plot_style(theme: str | None = None) -> Iterator[None]:
    """Draw in the style of the package, for a light or a dark page; also a decorator of functions that draw.

    Args:
        theme: "light" or "dark"; by default the theme of the surrounding context, or light outside of all contexts.

    Raises:
        ConfigError: The theme does not exist.
        MissingDependencyError: matplotlib is not installed.
    """
    with optional_dependency("drawing needs matplotlib: pip install 'clearhead[plot]'"):
        import matplotlib
    theme = theme or _THEME.get()
    if theme not in _PALETTES:
        raise ConfigError(f"unknown theme {theme!r}; expected light or dark")
    previous = _THEME.set(theme)
    try:
        with matplotlib.rc_context(fname=STYLES / f"{theme}.mplstyle"):
            yield
    finally:
        _THEME.reset(previous)


def palette() -> Palette:
    """Return the colors of the current theme."""
    return _PALETTES[_THEME.get()]


@plot_style()
def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given size in inches, without a window or global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


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
