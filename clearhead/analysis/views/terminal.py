"""Views for the terminal: heat maps, head grids, links, bars and patches.

Each is plain text, from tensors (H heads, T queries, S keys) or a map. `heatmap(..., color=True)` writes terminal
colors instead of shades. Views wider than `width` are reduced: first labels are cut, then cells are pooled by
their maximum.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, adaptive_max_pool2d

from clearhead._core.shapes import Float
from clearhead.analysis.measures import ValueWeightedNorm, check_labels, check_patches
from clearhead.analysis.views.attention_map import AttentionMap

_SHADES = " ·░▒▓█"
_MOST_ROWS = 64
_STEPS = ((18, 24, 32), (36, 80, 126), (59, 128, 189), (116, 183, 232), (191, 224, 245), (246, 252, 255))


def heatmap(
    weights: Float[Tensor, "T S"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    width: int | None = None,
    color: bool = False,
) -> str:
    """Return a heat map: one line per query, one column per key; darker cells have more weight.

    Args:
        weights: Attention weights, (T, S).
        rows: Query labels.
        columns: Key labels.
        width: Maximum width in columns.
        color: Whether to write terminal colors.
    """
    check_labels(weights, rows, columns)
    rows, columns = plain(rows), plain(columns)
    if width is not None and not _fits(rows, ["12"] * len(columns), width):
        return _pooled(weights, rows, columns, width, color)
    columns = columns if width is None else _cut(rows, columns, width)
    widths = [max(display_width(column), 2) for column in columns]
    heads = [column + " " * (size - display_width(column)) for column, size in zip(columns, widths, strict=True)]
    cells = [[_cell(w, size, color) for w, size in zip(row, widths, strict=True)] for row in weights.tolist()]
    return with_margin(["", *rows], [" ".join(row) for row in (heads, *cells)])


def shade(weight: float) -> str:
    """Return the character for a weight from 0 to 1."""
    return _SHADES[round(max(0.0, min(1.0, weight)) * (len(_SHADES) - 1))]


def head_grid(attention_map: AttentionMap, *, width: int = 80, side: int = 16) -> str:
    """Return all heads of a layer side by side; shades show the square root, so that broad heads are visible."""
    size = min(len(attention_map.rows), side), min(len(attention_map.columns), 2 * side)
    small = adaptive_max_pool2d(attention_map.all_heads(), size)
    wide = max(small.shape[-1], 16)  # fits "10 near diagonal"
    each = max(1, (width + 2) // (wide + 2))
    lines = []
    for first in range(0, attention_map.n_heads, each):
        some = range(first, min(attention_map.n_heads, first + each))
        lines.append("  ".join(f"{h} {attention_map.summary.labels[h].name}"[:wide].ljust(wide) for h in some))
        for row in range(small.shape[1]):
            cells = ("".join(shade(cell) for cell in small[h, row].sqrt().tolist()).ljust(wide) for h in some)
            lines.append("  ".join(cells))
        lines.append("")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


def head_table(attention_map: AttentionMap) -> list[tuple[str, str, str, str, str]]:
    """Return one row per head: number, label, score, entropy in nats, and distance."""
    return [
        (str(head), label.name, f"{label.score:.2f}", f"{entropy:.2f}", f"{distance:.2f}")
        for head, (label, entropy, distance) in enumerate(attention_map.summary.heads)
    ]


def link_list(
    weights: Float[Tensor, "*H T S"], rows: Sequence[str], columns: Sequence[str], *, least: float = 0.1, most: int = 4
) -> str:
    """Return one line per query with the keys that get at least `least`, in descending order, with their heads."""
    columns = plain(columns)
    head_labels = [f" (head {head})" for head in range(len(weights))] if weights.dim() > 2 else [""]
    by_query = weights.movedim(-2, 0).flatten(1)  # (T, H·S)
    best = by_query.topk(min(most, by_query.shape[1]), dim=-1)
    lines = []
    for values, flat_indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        entries = [(*divmod(index, len(columns)), value) for index, value in zip(flat_indices, values, strict=True)]
        links = [f"{columns[key]} {value:.2f}{head_labels[head]}" for head, key, value in entries if value >= least]
        lines.append(f"→ {', '.join(links) or '(spread out)'}")
    return with_margin(plain(rows), lines)


def norm_bars(norms: Sequence[tuple[str, Tensor]], *, width: int = 80) -> str:
    """Return one bar per block: the mean norm of the residual stream after it, with minimum and maximum."""
    paths = [path for path, _ in norms]
    most = max((float(norm.max()) for _, norm in norms), default=0.0) or 1.0
    room = max(8, width - max(map(len, paths), default=0) - 28)
    lines = []
    for _, norm in norms:
        low, mean, high = float(norm.min()), float(norm.mean()), float(norm.max())
        bar = ("█" * round(room * mean / most)).ljust(room)
        lines.append(f"{bar} {mean:7.3g}  ({low:.3g} … {high:.3g})")
    return with_margin(paths, lines)


def patch_map(image: Tensor, weights: Float[Tensor, " N"], grid: tuple[int, int], *, color: bool = False) -> str:
    """Return a gray image (height, width) of bytes and, to its right, the weight of each patch."""
    check_patches(weights, grid)
    rows, columns = grid
    gray = adaptive_avg_pool2d(image[None].float() / 255, (2 * rows, 4 * columns))[0]  # letters are narrow
    heat = (weights / weights.max().clamp(min=1e-12)).view(rows, columns)
    heat = heat.repeat_interleave(2, dim=0).repeat_interleave(4, dim=1)
    pairs = zip(gray, heat, strict=True)
    return "\n".join(
        f"{_cells(image_row, color)}   {_cells(heat_row, color)}".rstrip() for image_row, heat_row in pairs
    )


def sound_map(
    image: Tensor, weights: Float[Tensor, "R N"], rows: Sequence[str], *, width: int = 80, color: bool = False
) -> str:
    """Return a spectrogram (height, width) of bytes and, below it on the same time axis, the weights of some frames."""
    wide = max(1, min(2 * weights.shape[1], width - max(map(display_width, rows), default=0) - 1))
    above = adaptive_avg_pool2d(image[None].float() / 255, (12, wide))[0].square()
    below = [adaptive_max_pool2d(row[None, None].float(), (1, wide))[0, 0] for row in weights]
    shades = [*above, *(row / row.max().clamp(min=1e-12) for row in below)]
    return with_margin([""] * len(above) + list(rows), [_cells(row, color) for row in shades])


def contribution_table(
    contributions: Sequence[ValueWeightedNorm], columns: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    """Return one row per contribution: key, head, weight and share."""
    return [
        (
            f"{columns[contribution.key].strip()} ({contribution.key})",
            str(contribution.head),
            f"{contribution.weight:.3f}",
            f"{100 * contribution.share:.1f} %",
        )
        for contribution in contributions
    ]


def plain(labels: Sequence[str]) -> list[str]:
    """Return labels without surrounding blanks, unless they are all blanks."""
    return [label.strip() or label for label in labels]


def display_width(text: str) -> int:
    """Return the number of terminal columns of a text: two for wide East Asian letters, none for accents."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def flush_right(text: str, size: int) -> str:
    return " " * (size - display_width(text)) + text


def with_margin(labels: Sequence[str], lines: Sequence[str]) -> str:
    """Return lines with their labels in a left margin."""
    margin = max(map(display_width, labels), default=0)
    pairs = zip(labels, lines, strict=True)
    return "\n".join(f"{flush_right(label, margin)} {line}".rstrip() for label, line in pairs)


def _cells(row: Tensor, color: bool) -> str:
    return "".join(_cell(weight, 1, color) for weight in row.tolist())


def _cell(weight: float, size: int, color: bool) -> str:
    if not color:
        return shade(weight) * size
    at = max(0.0, min(1.0, weight)) ** 0.5 * (len(_STEPS) - 1)
    low = min(int(at), len(_STEPS) - 2)
    return f"{_between(_STEPS[low], _STEPS[low + 1], at - low)}{' ' * size}\x1b[0m"


def _between(start: Sequence[int], end: Sequence[int], share: float) -> str:
    """Return the escape code of a background color between two."""
    r, g, b = (round(a + (z - a) * share) for a, z in zip(start, end, strict=True))
    return f"\x1b[48;2;{r};{g};{b}m"


def paint(text: str, value: float) -> str:
    """Return a text on a background: blue up to 1, orange down to −1, none near 0 or for NaN."""
    if not abs(value) > 0.04:  # NaN too
        return text
    ink = (52, 122, 190) if value > 0 else (196, 98, 24)
    return f"\x1b[38;2;246;252;255m{_between(_STEPS[0], ink, min(1.0, abs(value)) ** 0.7)}{text}\x1b[0m"


def _fits(rows: Sequence[str], columns: Sequence[str], width: int) -> bool:
    margin = max(map(display_width, rows), default=0)
    return margin + sum(1 + max(display_width(column), 2) for column in columns) <= width and len(rows) <= _MOST_ROWS


def _cut(rows: Sequence[str], columns: Sequence[str], width: int) -> list[str]:
    """Return the column labels, cut to the longest length at which the map fits."""
    lengths = range(max(map(len, columns), default=2), 2, -1)
    longest = next((n for n in lengths if _fits(rows, [column[:n] for column in columns], width)), 2)
    return [column if len(column) <= longest else column[: longest - 1] + "…" for column in columns]


def _pooled(weights: Tensor, rows: Sequence[str], columns: Sequence[str], width: int, color: bool) -> str:
    """Return cells pooled by their maximum, one character each, with positions as column labels."""
    T = len(rows)
    S = len(columns)
    high = min(len(rows), _MOST_ROWS)
    firsts = [-(-i * T // high) for i in range(high)]
    labels = [f"{rows[i]} {i}"[-16:] for i in firsts]
    wide = max(1, min(S, width - max(map(display_width, labels), default=0) - 1))
    small = adaptive_max_pool2d(weights[None].float(), (high, wide))[0].sqrt()
    drawn = [_cells(row, color) for row in small / small.max().clamp(min=1e-12)]
    ticks = "".join(str(-(-i * S // wide)).ljust(10) for i in range(0, wide, 10))
    note = f"{T} × {S}, each cell the maximum of {-(-T // high)} × {-(-S // wide)}"
    return with_margin(["", *labels, ""], [ticks[:wide], *drawn, note])
