"""Helpers of the documentation pages: plots in the color of the page, matrices, tables and command lines.

    from plotting import bars, heat, lines, matrices, run, print_wrapped, table

Nothing here computes what a page explains. Plots use `currentColor` for ink, so that they are readable on a light page,
a dark page and paper.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

INK = "#010203"  # placeholder for the color of the page
SIDE_WITH_VALUES = 30  # pixels of a square that shows its value
SCALE_WIDTH = 160  # pixels
SHORT = 13  # characters of a cell that is not wrapped
COLORS = ("#4477aa", "#cc3e50", "#228833", "#8f7700", "#aa3377", "#1f88ad")
POSITIVE = "var(--heat-positive, #4477aa)"
NEGATIVE = "var(--heat-negative, #ee6677)"


def themed(svg: str) -> str:
    """Replace the colors in an SVG by those of the page's theme (site.css); other pages show the colors themselves."""
    for i, color in enumerate(COLORS, 1):
        svg = svg.replace(color, f"var(--plot-{i}, {color})")
    return svg


@dataclass(frozen=True)
class HTMLOutput:
    """HTML that a notebook displays."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


@dataclass(frozen=True)
class Formula:
    """LaTeX that a notebook displays."""

    latex: str

    def _repr_latex_(self) -> str:
        return f"$${self.latex}$$"


def matrices(digits: int = 2, **arrays: Any) -> Formula:
    """Return named vectors and matrices as a formula: `matrices(Q=q, K=k)`."""
    return Formula(r" \qquad ".join(f"{_name(name)} = {_matrix(value, digits)}" for name, value in arrays.items()))


def _name(name: str) -> str:
    stem, _, index = name.partition("_")
    if len(stem) > 1:
        return rf"\text{{{name.replace('_', ' ')}}}"
    return rf"\mathbf{{{stem}}}_{{{index}}}" if index else rf"\mathbf{{{stem}}}"


def _matrix(value: Any, digits: int) -> str:
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(rows, list | tuple):
        return number(rows, digits)
    rows = [row if isinstance(row, list | tuple) else [row] for row in rows] if _deep(rows) else [rows]
    body = r" \\ ".join(" & ".join(number(x, digits) for x in row) for row in rows)
    return rf"\begin{{bmatrix}} {body} \end{{bmatrix}}"


def _deep(rows: Sequence[Any]) -> bool:
    return bool(rows) and isinstance(rows[0], list | tuple)


def number(x: Any, digits: int = 2) -> str:
    """Format a number: integers without decimals, other numbers with `digits` decimals."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return str(x)
    if x != x or abs(x) == float("inf"):
        return {True: r"\infty", False: r"-\infty"}[x > 0] if x == x else r"\mathrm{NaN}"
    if abs(x - round(x)) < 1e-9:
        return str(round(x))
    return f"{x:.{digits}f}" if round(x, digits) else f"{0:.{digits}f}"


def table(rows: Iterable[Sequence[Any]], columns: Sequence[str], digits: int = 3) -> HTMLOutput:
    """Return a table with numbers aligned right and other cells left."""
    head = "".join(f"<th>{escape(str(name))}</th>" for name in columns)
    body = "".join("<tr>" + "".join(_cell(x, digits) for x in row) + "</tr>" for row in rows)
    return HTMLOutput(f'<div class="numbers"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')


def _cell(x: Any, digits: int) -> str:
    if hasattr(x, "item"):
        x = x.item()
    if isinstance(x, bool) or not isinstance(x, int | float):
        short = ' class="short"' if len(str(x)) <= SHORT else ""
        return f"<td{short}>{escape(str(x))}</td>"
    text = f"{x:,}" if isinstance(x, int) else f"{x:.2e}" if 0 < abs(x) < 10**-digits else f"{x:,.{digits}f}"
    return f'<td class="number">{text.replace("-", "−")}</td>'


def heat(
    values: Any,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    title: str = "",
    digits: int = 2,
    side: int | None = None,
) -> HTMLOutput:
    """Return a matrix as colored squares, positive blue and negative red, with its values or a color scale."""
    grid = [[float(x) for x in row] for row in (values.tolist() if hasattr(values, "tolist") else values)]
    T, S = len(grid), len(grid[0])
    rows = [str(x) for x in (range(T) if rows is None else rows)]
    columns = [str(x) for x in (range(S) if columns is None else columns)]
    side = side or max(8, min(46, 560 // S))
    longest = max(map(len, columns))
    is_rotated = 7 * longest > side
    margin_left, margin_top = 14 + 7 * max(map(len, rows)), 16 + 6 * longest if is_rotated else 22
    width = max(margin_left + S * side + (8 + 4 * longest if is_rotated else 8), margin_left + 7 * len(title))
    bottom = margin_top + T * side
    has_scale = side < SIDE_WITH_VALUES
    height = bottom + (24 if title else 4) + (40 if has_scale else 0)
    width = max(width, margin_left + SCALE_WIDTH + 30) if has_scale else width
    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" font-size="12" fill="currentColor">']
    parts += [f"<title>{escape(title)}</title>"] if title else []
    step = -(-18 // side)  # number of squares that a label needs
    for j in range(0, S, step):
        x, y = margin_left + j * side + side / 2, margin_top - 8
        anchor = f'text-anchor="start" transform="rotate(-50 {x} {y})"' if is_rotated else 'text-anchor="middle"'
        parts.append(f'<text x="{x}" y="{y}" {anchor}>{escape(columns[j])}</text>')
    for i in range(0, T, step):
        y = margin_top + i * side + side / 2 + 4
        parts.append(f'<text x="{margin_left - 6}" y="{y}" text-anchor="end">{escape(rows[i])}</text>')
    parts += _squares(grid, margin_left, margin_top, side, digits)
    if title:
        parts.append(f'<text x="{margin_left}" y="{bottom + 18}" font-style="italic">{escape(title)}</text>')
    if has_scale:
        parts += _color_scale(grid, margin_left, height - 34, digits)
    return HTMLOutput(f'<figure class="drawn">{"".join(parts)}</svg></figure>')


def _color_scale(grid: list[list[float]], x: float, y: float, digits: int) -> Iterable[str]:
    """Yield a bar with the colors of a matrix and the values at its ends and in its middle."""
    top = _largest(grid)
    low = -top if any(value < 0 for row in grid for value in row) else 0.0
    n_squares, side = 20, SCALE_WIDTH / 20
    for i in range(n_squares):
        value = low + (top - low) * (i + 0.5) / n_squares
        size = f'width="{side}" height="12"'
        yield f'<rect x="{x + i * side}" y="{y}" {size} {_fill(value, top)}/>'
    for share in (0.0, 0.5, 1.0):
        text = f"{low + (top - low) * share:.{digits}f}".replace("-", "−")
        yield f'<text x="{x + share * SCALE_WIDTH}" y="{y + 27}" text-anchor="middle">{text}</text>'


def _largest(grid: list[list[float]]) -> float:
    return max((abs(x) for row in grid for x in row if abs(x) < float("inf")), default=0) or 1


def _fill(x: float, top: float) -> str:
    share = 0.0 if x == float("-inf") else min(1.0, abs(x) / top)
    return f'fill="{NEGATIVE if x < 0 else POSITIVE}" fill-opacity="{0.05 + 0.8 * share:.2f}"'


def _squares(grid: list[list[float]], margin_left: int, margin_top: int, side: int, digits: int) -> Iterable[str]:
    top = _largest(grid)
    for i, row in enumerate(grid):
        for j, x in enumerate(row):
            box = f'x="{margin_left + j * side}" y="{margin_top + i * side}" width="{side - 1}" height="{side - 1}"'
            yield f"<rect {box} {_fill(x, top)}/>"
            if side >= SIDE_WITH_VALUES:
                text = "−∞" if x == float("-inf") else f"{round(x, digits) or 0.0:.{digits}f}".replace("-", "−")
                position = f'x="{margin_left + (j + 0.5) * side}" y="{margin_top + i * side + side / 2 + 4}"'
                yield f'<text {position} text-anchor="middle">{text}</text>'


def axes(width: float = 6.4, height: float = 3.2, columns: int = 1) -> Any:
    """Return a matplotlib figure and its axes, in the ink of the page; `figure_to_svg(figure)` displays it."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    settings = {
        **ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "axes.prop_cycle": mpl.cycler(color=COLORS),
        "figure.facecolor": "none",
        "font.size": 10,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "clearhead",
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.h_pad": 0.1,  # inches; labels of minor ticks may be above the axes
    }
    mpl.rcParams.update(settings)
    return plt.subplots(1, columns, figsize=(width, height))


def figure_to_svg(figure: Any) -> HTMLOutput:
    """Return a matplotlib figure as SVG in the color and font of the page."""
    import matplotlib.pyplot as plt

    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    svg = file.getvalue()
    svg = themed(svg[svg.index("<svg") :].replace(INK, "currentColor"))
    svg = re.sub(r"font: ([^;\"]*)'DejaVu Sans'[^;\"]*", r"font: \1sans-serif", svg)
    return HTMLOutput(f'<figure class="drawn">{svg}</figure>')


def lines(x: Any, ys: Mapping[str, Any], *, xlabel: str = "", ylabel: str = "", **scale: Any) -> HTMLOutput:
    """Return a line plot of named curves over x; options such as `xscale="log"` are set on the axes."""
    figure, ax = axes()
    for name, y in ys.items():
        ax.plot(list(x), list(y), label=name, linewidth=2)
    ax.set(xlabel=xlabel, ylabel=ylabel, **scale)
    if len(ys) > 1:
        ax.legend()
    return figure_to_svg(figure)


def bars(names: Sequence[str], groups: Mapping[str, Any], *, ylabel: str = "", **scale: Any) -> HTMLOutput:
    """Return a grouped bar chart: one group per name, one color per key of `groups`."""
    figure, ax = axes()
    width = 0.8 / len(groups)
    for g, (label, values) in enumerate(groups.items()):
        places = [i + (g - (len(groups) - 1) / 2) * width for i in range(len(names))]
        ax.bar(places, [float(x) for x in values], width * 0.92, label=label)
    ax.set_xticks(range(len(names)), names)
    ax.set(ylabel=ylabel, **scale)
    if len(groups) > 1:
        ax.legend()
    return figure_to_svg(figure)


def resource(name: str) -> Path:
    """Return the path of a file that a page reads, such as "sounds/pi.wav".

    The file is in this folder or the one above: a checkout and the folder of downloaded notebooks both have it.
    """
    here = Path(__file__).parent
    path = next((folder / name for folder in (here, here.parent) if (folder / name).exists()), None)
    if path is None:
        raise FileNotFoundError(f"{name} is not in {here} or above it; download the notebooks with their files")
    return path


def results(name: str) -> Any:
    """Return a committed results file, such as "study-positions"."""
    return json.loads(resource(f"results/{name}.json").read_text(encoding="utf-8"))


def print_wrapped(message: object) -> None:
    """Print a message in lines that fit the page, without breaks at hyphens."""
    print(textwrap.fill(str(message), 88, break_on_hyphens=False))


def run(command: str, *, lines: int | None = None) -> None:
    """Run a command line in this process as in a terminal of 80 columns, and print its output.

    `lines` limits the number of printed lines; the number of omitted lines is printed.
    """
    import rich.console

    rich.console._is_jupyter = lambda: False  # type: ignore[attr-defined]  # plain text, as in a terminal
    os.environ["COLUMNS"] = "80"
    from clearhead.cli import main

    words = shlex.split(command)
    out, previous_argv = io.StringIO(), sys.argv
    try:
        sys.argv = words
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as stop:
        if stop.code not in (None, 0) and not out.getvalue():
            raise RuntimeError(f"{command} ended with status {stop.code}") from None
    finally:
        sys.argv = previous_argv
    # Keep colors, which pages display, but remove the escape codes with which a progress bar hides the cursor.
    text = re.sub(r"\x1b\[\?25[hl]", "", out.getvalue()).rstrip("\n").split("\n")
    output_lines = [f"$ {command}", *(line.rstrip() for line in text[:lines])]
    if lines is not None and len(text) > lines:
        output_lines.append(f"… {len(text) - lines} more lines")
    if any("8;2;" in line for line in output_lines):  # pages show the 16 colors of a terminal, but not 24-bit colors
        from IPython.display import display

        display(HTMLOutput(f'<div class="highlight"><pre>{terminal_html(chr(10).join(output_lines))}</pre></div>'))
    else:
        print("\n".join(output_lines))


def terminal_html(text: str) -> str:
    """Return the output of a terminal with its 24-bit colors as HTML, without other escape codes."""
    parts, n_open = [], 0
    for piece in re.split(r"(\x1b\[[\d;]*m)", text):
        if not piece.startswith("\x1b["):
            parts.append(escape(piece))
        elif color := re.fullmatch(r"\x1b\[([34])8;2;(\d+);(\d+);(\d+)m", piece):
            name = "color" if color[1] == "3" else "background"
            parts.append(f'<span style="{name}: rgb({color[2]}, {color[3]}, {color[4]})">')
            n_open += 1
        else:
            parts.append("</span>" * n_open)
            n_open = 0
    return "".join(parts) + "</span>" * n_open
