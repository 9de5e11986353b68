"""Views as matplotlib figures; `save` writes PNG, SVG or PDF. H heads, T queries, S keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core.plotting import new_figure, palette, plot_style, render_figure
from clearhead._core.shapes import Float
from clearhead.analysis.measures import ValueWeightedNorm, check_labels, check_patches
from clearhead.analysis.views.attention_map import AttentionMap
from clearhead.analysis.views.chart import Chart, PCAProjection, bar_chart
from clearhead.analysis.views.page import write_file
from clearhead.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELLED = 64  # maximum number of tokens with a label each


@plot_style()
def heat(weights: Float[Tensor, "T S"], rows: Sequence[str], columns: Sequence[str], *, title: str = "") -> Figure:
    """Draw a heat map: queries down, keys across, darker for more weight."""
    check_labels(weights, rows, columns)
    T, S = weights.shape
    width, height = 7.0, 6.2
    if max(T, S) <= _LABELLED:
        width = max(3.2, min(11.0, 1.6 + 0.32 * S))
        height = max(2.4, min(11.0, 1.3 + 0.32 * T))
    figure, axes = _plot(width, height, title)
    aspect = "equal" if max(T, S) <= 3 * min(T, S) else "auto"
    image = axes.imshow(weights.detach().float().cpu().numpy(), cmap=_shades(), vmin=0, aspect=aspect)
    axes.tick_params(length=0, labelsize=9, colors=palette().ink)
    axes.spines[:].set_visible(False)
    if max(T, S) <= _LABELLED:
        axes.xaxis.tick_top()
        axes.set_xticks(range(S), [_plain(c) for c in columns], rotation=50, ha="left", rotation_mode="anchor")
        axes.set_yticks(range(T), [_plain(r) for r in rows])
    axes.set_xlabel("keys", fontsize=8)
    axes.set_ylabel("queries", fontsize=8)
    axes.xaxis.set_label_position("bottom")
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=18, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, colors=palette().soft, length=0)
    bar.set_label("weight", fontsize=8)
    return figure


@plot_style()
def head_grid(maps: Sequence[AttentionMap], *, title: str = "") -> Figure:
    """Draw small heat maps: one row per layer, one column per head, each with its label."""
    n_columns = max(attention_map.n_heads for attention_map in maps)
    figure = _figure(1.3 * n_columns + 0.5, 1.5 * len(maps) + 0.3, title)
    for row_axes, attention_map in zip(figure.subplots(len(maps), n_columns, squeeze=False), maps, strict=True):
        head_maps = attention_map.all_heads()
        for head, axes in enumerate(row_axes):
            axes.set_axis_off()
            if head >= attention_map.n_heads:
                continue
            axes.imshow(head_maps[head].sqrt().numpy(), cmap=_shades(), aspect="auto", vmin=0)
            axes.set_title(
                f"{attention_map.layer}.{head} {attention_map.summary.labels[head].name}",
                fontsize=6,
                color=palette().soft,
            )
    return figure


@plot_style()
def arcs(weights: Float[Tensor, "*H T S"], rows: Sequence[str], columns: Sequence[str], *, title: str = "") -> Figure:
    """Draw lines from queries on the left to keys on the right, stronger for more weight; one color per head."""
    if max(len(rows), len(columns)) > _LABELLED:
        raise ShapeError(
            f"there are {len(rows)} queries and {len(columns)} keys; lines are readable up to {_LABELLED}: "
            "draw a heat map, or select some rows and columns"
        )
    from colorsys import hls_to_rgb

    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    n_rows = max(len(rows), len(columns))
    figure, axes = _plot(4.2, max(2.0, 0.27 * n_rows + 0.5), title)
    axes.set_axis_off()
    query_y = [i + (n_rows - len(rows)) / 2 for i in range(len(rows))]
    key_y = [i + (n_rows - len(columns)) / 2 for i in range(len(columns))]
    colors: list[object] = [palette().heat]
    if weights.dim() > 2:  # one hue per head, of similar lightness
        colors = [hls_to_rgb(i / len(weights), 0.4 if i % 2 else 0.52, 0.75) for i in range(len(weights))]
    weights = weights.detach().float().cpu().reshape(-1, len(rows), len(columns))
    for head, i, j in (weights >= 0.03).nonzero().tolist():
        weight = float(weights[head, i, j])
        offset = 0.5 * (head - (len(colors) - 1) / 2) / len(colors)  # so that heads do not overlap
        y_start, y_end = query_y[i] + offset, key_y[j] + offset
        points = [(0.0, y_start), (0.45, y_start), (0.55, y_end), (1.0, y_end)]
        curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
        linewidth = 0.4 + (2.6 if len(colors) == 1 else 1.4) * weight
        patch = PathPatch(curve, fill=False, edgecolor=colors[head], alpha=min(1.0, weight), linewidth=linewidth)
        axes.add_patch(patch)
    if len(colors) > 1:
        for head, color in enumerate(colors):
            axes.plot([], [], color=color, label=f"head {head}", linewidth=2)
        figure.legend(loc="outside lower center", ncols=min(4, len(colors)), fontsize=7, frameon=False)
    for x, side, ys, labels in ((-0.03, "right", query_y, rows), (1.03, "left", key_y, columns)):
        for y, label in zip(ys, labels, strict=True):
            axes.text(x, y, _plain(label), ha=side, va="center", fontsize=9, color=palette().ink)
    axes.set(xlim=(-0.5, 1.5), ylim=(n_rows - 0.4, -0.6))
    return figure


@plot_style()
def chart(chart: Chart | PCAProjection) -> Figure:
    """Draw a chart as colored cells or bars, or a projection as labeled points.

    More than 32 columns have no cell texts.
    """
    if isinstance(chart, PCAProjection):
        return _scatter(chart)
    if chart.is_bars:
        return _bars(chart)
    has_labels = len(chart.columns) <= 32
    width = 1.8 + (0.72 if has_labels else 0.12) * len(chart.columns)
    height = 1.3 + 0.33 * len(chart.rows)
    figure, axes = _plot(max(4.2, min(24.0, width)), max(2.0, min(14.0, height)), _plain(chart.title))
    shades = chart.shades()
    colors = _shades(signed=chart.signed)
    axes.imshow(shades.numpy(), cmap=colors, vmin=-1 if chart.signed else 0, vmax=1, aspect="auto")
    for i, (row, values) in enumerate(zip(chart.cells(), shades.tolist(), strict=True)):
        for j, (word, value) in enumerate(zip(row, values, strict=True) if has_labels else ()):
            text = word if len(word) <= 9 else word[:8] + "…"
            color = "white" if abs(value) > 0.6 else palette().ink
            axes.text(j, i, _plain(text), ha="center", va="center", fontsize=8, color=color)
    axes.tick_params(length=0, labelsize=8, colors=palette().ink)
    axes.spines[:].set_visible(False)
    if len(chart.columns) <= _LABELLED:
        names = [_plain(column) for column in chart.columns]
        axes.set_xticks(range(len(names)), names, rotation=45 if any(len(n) > 3 for n in names) else 0, ha="right")
    axes.set_yticks(range(len(chart.rows)), [_plain(row) for row in chart.rows])
    axes.set_xlabel(chart.note, fontsize=7, color=palette().soft)
    return figure


def _bars(chart: Chart) -> Figure:
    """Draw a horizontal bar chart."""
    figure, axes = _plot(5.6, max(1.8, 0.26 * len(chart.rows) + 0.9), _plain(chart.title), size=9)
    values = chart.values[:, 0].tolist()
    axes.barh(
        range(len(values)),
        values,
        color=[palette().heat if value > 0 else palette().low for value in values],
        height=0.65,
    )
    axes.axvline(0, color=palette().soft, linewidth=0.6)
    axes.set_yticks(range(len(values)), [_plain(name) for name in chart.rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel(chart.note or chart.columns[0], fontsize=7, color=palette().soft)
    axes.tick_params(labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _scatter(projection: PCAProjection) -> Figure:
    """Draw labeled points in two dimensions."""
    figure, axes = _plot(6.4, 5.6, projection.title, size=9)
    x, y = projection.points.T.tolist()
    axes.scatter(x, y, s=8, color=palette().heat, alpha=0.6, linewidth=0)
    for px, py, label in zip(x, y, projection.names, strict=True):
        axes.annotate(_plain(label), (px, py), (2, 2), textcoords="offset points", fontsize=7, color=palette().ink)
    axes.tick_params(labelsize=7, colors=palette().soft, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


@plot_style()
def measures(maps: Sequence[AttentionMap], *, title: str = "") -> Figure:
    """Draw entropy and distance of every head by layer; colors are the labels."""
    figure = _figure(8.4, 3.6, title)
    entropy_axes, distance_axes = figure.subplots(1, 2)
    names = list(dict.fromkeys(name.name for p in maps for name in p.summary.labels))
    stack_names = {"Encoder self-attention": "enc", "Decoder self-attention": "dec", "Cross-attention": "cross"}
    map_names = [f"{stack_names.get(p.title, '')} {p.layer}".strip() for p in maps]
    for axes, attribute, axis_label in (
        (entropy_axes, "entropy", "entropy, nats"),
        (distance_axes, "distance", "distance"),
    ):
        for number, name in enumerate(names):
            points = [
                (index + (head - p.n_heads / 2) * 0.06, getattr(p.summary, attribute)[head])
                for index, p in enumerate(maps)
                for head, label in enumerate(p.summary.labels)
                if label.name == name
            ]
            axes.scatter(*zip(*points, strict=True), s=16, color=f"C{number}", label=name, linewidth=0)
        axes.set_xticks(range(len(maps)), map_names, fontsize=7, rotation=30)
        _ruled(axes, axis_label)
    distance_axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


@plot_style()
def norms(norms: Sequence[tuple[str, Tensor]], *, title: str = "") -> Figure:
    """Draw the norm of the residual stream after each block: mean over tokens, with the range."""
    if not norms:
        raise ConfigError("there are no norms to draw; record the outputs of the blocks")
    figure, axes = _plot(6.0, 3.4, title)
    positions = range(len(norms))
    # One line per stack, because the residual streams of encoder and decoder are separate.
    stacks = [path.rpartition(".")[0] for path, _ in norms]
    for number, stack in enumerate(dict.fromkeys(stacks)):
        indices = [i for i in positions if stacks[i] == stack]
        stack_norms = [norms[i][1] for i in indices]
        low = [float(norm.min()) for norm in stack_norms]
        mean = [float(norm.mean()) for norm in stack_norms]
        high = [float(norm.max()) for norm in stack_norms]
        labels = ("minimum to maximum", "mean") if not number else (None, None)
        axes.fill_between(indices, low, high, color=palette().heat, alpha=0.2, linewidth=0, label=labels[0])
        axes.plot(indices, mean, "o-", color=palette().heat, markersize=4, label=labels[1])
    axes.set_xticks(positions, [path for path, _ in norms], rotation=30, ha="right", fontsize=7)
    axes.set_ylim(bottom=0)
    _ruled(axes, "norm of the residual stream")
    axes.legend(fontsize=7, frameon=False)
    return figure


@plot_style()
def contribution_bars(contributions: Sequence[ValueWeightedNorm], columns: Sequence[str], *, title: str = "") -> Figure:
    """Draw one bar per contribution: key, head and share."""
    shares = [
        (
            f"{columns[contribution.key].strip() or columns[contribution.key]}, head {contribution.head}",
            100 * contribution.share,
        )
        for contribution in contributions
    ]
    return _bars(bar_chart(title, shares, "share of the value-weighted norms of all keys and heads, %"))


@plot_style()
def patches(
    image: Tensor, weights: Float[Tensor, "H N"], grid: tuple[int, int], *, query: int | None = None, title: str = ""
) -> Figure:
    """Draw a gray image and each head's weights over its patches; `query` frames the query's patch."""
    from matplotlib.patches import Rectangle

    check_patches(weights, grid)
    rows, columns = grid
    weights, H = weights.detach().float().cpu(), weights.shape[0]
    across = min(5, H + 1)
    down = math.ceil((H + 1) / min(5, H + 1))
    figure = _figure(1.7 * across, 1.85 * down, title)
    cells = figure.subplots(down, across, squeeze=False).flatten()
    height, width = image.shape
    patch_height = height / rows
    patch_width = width / columns
    extent = (0, width, height, 0)
    for number, axes in enumerate(cells):
        axes.set_axis_off()
        if number > H:
            continue
        axes.imshow(image.cpu().numpy(), cmap="gray", vmin=0, vmax=255, extent=extent)
        if number:
            relative = (weights[number - 1] / weights[number - 1].max().clamp(min=1e-12)).view(rows, columns)
            alpha = (0.75 * relative.sqrt()).numpy()
            axes.imshow(torch.ones(rows, columns).numpy(), cmap="autumn", vmin=0, vmax=1.4, alpha=alpha, extent=extent)
        axes.set_title("image" if not number else f"head {number - 1}", fontsize=7, color=palette().soft)
        if query is not None:
            corner = (query % columns * patch_width, query // columns * patch_height)
            axes.add_patch(Rectangle(corner, patch_width, patch_height, fill=False, edgecolor="#ff5a1f", linewidth=1.5))
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as .png, .svg or .pdf; the same figure gives the same file."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"unknown figure format of {path.name}; expected a name ending in .png, .svg or .pdf")
    return write_file(render_figure(figure, path.suffix, dpi=160, svg_fonts="path"), path, "figure")


def _figure(width: float, height: float, title: str, *, size: int = 10) -> Figure:
    figure: Figure = new_figure(width, height)
    if title:
        figure.suptitle(title, fontsize=size, color=palette().ink)
    return figure


def _plot(width: float, height: float, title: str, *, size: int = 10) -> tuple[Figure, Any]:
    """Return a figure with one axes."""
    figure = _figure(width, height, title, size=size)
    return figure, figure.add_subplot()


def _ruled(axes: Any, label: str) -> None:
    """Label the y axis and add grid lines."""
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _shades(*, signed: bool = False) -> Any:
    """Return the color map of the current theme, from zero or from negative values."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = palette()
    stops = [*colors.negative, colors.shades[3], colors.shades[5]] if signed else list(colors.shades)
    return LinearSegmentedColormap.from_list("clearhead", stops).with_extremes(bad=colors.missing)


def _plain(label: str) -> str:
    """Escape a token for matplotlib, in which a dollar sign starts a formula."""
    return (label.strip() or label).replace("$", r"\$")
