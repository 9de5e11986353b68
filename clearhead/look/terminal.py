"""Views for the terminal: shaded cells between tokens, all heads side by side, links, bars and patches.

Each is plain text, made from plain tensors or a picture. `heatmap(..., colour=True)` writes terminal colours instead
of shades. What is wider than `width` is made narrower: first the labels are cut, then cells are put together by
their largest.

    H heads   T queries   S keys
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from clearhead._shapes import Float
from clearhead.errors import ShapeError
from clearhead.look.measures import Contribution
from clearhead.look.picture import Picture

_SHADES = " ·░▒▓█"
_MOST_ROWS = 64
_STEPS = ((18, 24, 32), (36, 80, 126), (59, 128, 189), (116, 183, 232), (191, 224, 245), (246, 252, 255))


def heatmap(
    weights: Float[Tensor, "T S"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    width: int | None = None,
    colour: bool = False,
) -> str:
    """One line a query, one column a key; the fuller the cell, the more weight. Labels stand beside and above."""
    if tuple(weights.shape) != (len(rows), len(columns)):
        raise ShapeError(
            f"weights are {tuple(weights.shape)} and there are {len(rows)} row and {len(columns)} column labels"
        )
    rows, columns = plain(rows), plain(columns)
    if width is not None and not _fits(rows, ["12"] * len(columns), width):
        return _pooled(weights, rows, columns, width, colour)
    columns = columns if width is None else _cut(rows, columns, width)
    margin = max(map(letters, rows), default=0)
    widths = [max(letters(column), 2) for column in columns]
    lines = [" " * margin + " " + " ".join(_left(column, size) for column, size in zip(columns, widths, strict=True))]
    for label, row in zip(rows, weights.tolist(), strict=True):
        cells = [_cell(weight, size, colour) for weight, size in zip(row, widths, strict=True)]
        lines.append(flush_right(label, margin) + " " + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def shade(weight: float) -> str:
    """The character for a weight from 0 to 1."""
    return _SHADES[min(len(_SHADES) - 1, max(0, round(weight * (len(_SHADES) - 1))))]


def head_grid(picture: Picture, *, width: int = 80, side: int = 16) -> str:
    """Every head of a layer, small, side by side: shades are of the square root, so that broad heads show too."""
    small = adaptive_max_pool2d(
        picture.everything(), (min(len(picture.rows), side), min(len(picture.columns), 2 * side))
    )
    wide = max(small.shape[-1], 12)
    each = max(1, (width + 2) // (wide + 2))
    lines = []
    for first in range(0, picture.n_heads, each):
        some = range(first, min(picture.n_heads, first + each))
        lines.append("  ".join(f"{h} {picture.summary.labels[h].name}"[:wide].ljust(wide) for h in some))
        for row in range(small.shape[1]):
            cells = ("".join(shade(cell) for cell in small[h, row].sqrt().tolist()).ljust(wide) for h in some)
            lines.append("  ".join(cells))
        lines.append("")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


def head_table(picture: Picture) -> list[tuple[str, str, str, str, str]]:
    """A row a head: its number, the name of its pattern, that pattern's score, entropy in nats, and distance."""
    found = picture.summary
    return [
        (str(head), name.name, f"{name.score:.2f}", f"{entropy:.2f}", f"{distance:.2f}")
        for head, (name, entropy, distance) in enumerate(zip(found.labels, found.entropy, found.distance, strict=True))
    ]


def link_list(
    weights: Float[Tensor, "*H T S"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    least: float = 0.1,
    most: int = 4,
) -> str:
    """A line a query, with an arrow to each key that gets at least `least`, largest first; of several heads, with
    the head's number."""
    rows, columns = plain(rows), plain(columns)
    margin = max(map(letters, rows), default=0)
    named = [f" (head {head})" for head in range(len(weights))] if weights.dim() > 2 else [""]
    by_query = weights.movedim(-2, 0).flatten(1)  # (T, H·S)
    best = by_query.topk(min(most, by_query.shape[1]), dim=-1)
    lines = []
    for label, values, places in zip(rows, best.values.tolist(), best.indices.tolist(), strict=True):
        found = [(*divmod(place, len(columns)), value) for place, value in zip(places, values, strict=True)]
        links = [f"{columns[key]} {value:.2f}{named[head]}" for head, key, value in found if value >= least]
        lines.append(f"{flush_right(label, margin)} → {', '.join(links) or '(spread out)'}")
    return "\n".join(lines)


def norm_bars(norms: Sequence[tuple[str, Tensor]], *, width: int = 80) -> str:
    """A bar a block: the mean length of the residual stream's vectors after it, with the shortest and the longest."""
    margin = max((len(path) for path, _ in norms), default=0)
    most = max((float(norm.max()) for _, norm in norms), default=0.0) or 1.0
    room = max(8, width - margin - 28)
    lines = []
    for path, norm in norms:
        low, mean, high = float(norm.min()), float(norm.mean()), float(norm.max())
        bar = ("█" * round(room * mean / most)).ljust(room)
        lines.append(f"{path.rjust(margin)} {bar} {mean:7.3g}  ({low:.3g} … {high:.3g})")
    return "\n".join(lines)


def patch_map(image: Tensor, weights: Float[Tensor, " N"], grid: tuple[int, int], *, colour: bool = False) -> str:
    """A grey picture (height, width) of bytes at the left, and the weight of each of its patches at the right."""
    rows, columns = grid
    if weights.numel() != rows * columns:
        raise ShapeError(
            f"there are {weights.numel()} weights for {rows}×{columns} patches; leave out tokens that stand for none"
        )
    tall, wide = 2 * rows, 4 * columns  # a letter is about twice as high as wide
    small = torch.nn.functional.adaptive_avg_pool2d(image[None].float() / 255, (tall, wide))[0]
    heat = (weights / weights.max().clamp(min=1e-12)).view(rows, columns)
    heat = heat.repeat_interleave(2, dim=0).repeat_interleave(4, dim=1)
    return "\n".join(
        (
            "".join(_cell(value, 1, colour) for value in left) + "   " + "".join(_cell(v, 1, colour) for v in right)
        ).rstrip()
        for left, right in zip(small.tolist(), heat.tolist(), strict=True)
    )


def sound_map(
    image: Tensor, weights: Float[Tensor, "R N"], rows: Sequence[str], *, width: int = 80, colour: bool = False
) -> str:
    """A spectrogram (height, width) of bytes; below it, along the same time, a line for each of some moments: where
    it looks."""
    margin = max(map(letters, rows), default=0)
    wide = max(1, min(2 * weights.shape[1], width - margin - 1))
    above = torch.nn.functional.adaptive_avg_pool2d(image[None].float() / 255, (12, wide))[0].square()
    below = [adaptive_max_pool2d(row[None, None].float(), (1, wide))[0, 0] for row in weights]
    shades = [*above, *(row / row.max().clamp(min=1e-12) for row in below)]
    names = [""] * len(above) + list(rows)
    lines = zip(names, (map(float, row) for row in shades), strict=True)
    drawn = (flush_right(name, margin) + " " + "".join(_cell(v, 1, colour) for v in row) for name, row in lines)
    return "\n".join(line.rstrip() for line in drawn)


def contribution_table(found: Sequence[Contribution], columns: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """A row a contribution: key, head, weight, and its share of all that was added."""
    return [
        (
            f"{columns[one.key].strip()} ({one.key})",
            str(one.head),
            f"{one.weight:.3f}",
            f"{100 * one.share:.1f} %",
        )
        for one in found
    ]


def plain(labels: Sequence[str]) -> list[str]:
    """Labels without the blanks around them, unless they are all blanks."""
    return [label.strip() or label for label in labels]


def letters(text: str) -> int:
    """How many columns of a terminal a text takes: two for the wide letters of Asian scripts, none for
    accents alone."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _left(text: str, size: int) -> str:
    return text + " " * (size - letters(text))


def flush_right(text: str, size: int) -> str:
    return " " * (size - letters(text)) + text


def _cell(weight: float, size: int, colour: bool) -> str:
    if not colour:
        return shade(weight) * size
    at = max(0.0, min(1.0, weight)) ** 0.5 * (len(_STEPS) - 1)
    low = min(int(at), len(_STEPS) - 2)
    r, g, b = (round(a + (z - a) * (at - low)) for a, z in zip(_STEPS[low], _STEPS[low + 1], strict=True))
    return f"\x1b[48;2;{r};{g};{b}m{' ' * size}\x1b[0m"


def paint(text: str, value: float) -> str:
    """A text on a background: blue for a value up to 1, orange down to −1, nothing about 0 or for NaN."""
    if not abs(value) > 0.04:  # NaN too
        return text
    share = min(1.0, abs(value)) ** 0.7
    paper, ink = (18, 24, 32), (52, 122, 190) if value > 0 else (196, 98, 24)
    r, g, b = (round(a + (z - a) * share) for a, z in zip(paper, ink, strict=True))
    return f"\x1b[38;2;246;252;255m\x1b[48;2;{r};{g};{b}m{text}\x1b[0m"


def _fits(rows: Sequence[str], columns: Sequence[str], width: int) -> bool:
    margin = max(map(letters, rows), default=0)
    return margin + sum(1 + max(letters(column), 2) for column in columns) <= width and len(rows) <= _MOST_ROWS


def _cut(rows: Sequence[str], columns: Sequence[str], width: int) -> list[str]:
    """The column labels, cut to the longest length at which the map fits."""
    longest = max((len(column) for column in columns), default=0)
    while longest > 2 and not _fits(rows, [column[:longest] for column in columns], width):
        longest -= 1
    return [column if len(column) <= longest else column[: longest - 1] + "…" for column in columns]


def _pooled(weights: Tensor, rows: Sequence[str], columns: Sequence[str], width: int, colour: bool) -> str:
    """Cells put together by their largest, one letter each, with positions instead of the labels of columns."""
    T, S = len(rows), len(columns)
    high = min(T, _MOST_ROWS)
    firsts = [-(-i * T // high) for i in range(high)]
    labels = [f"{rows[i]} {i}"[-16:] for i in firsts]
    margin = max(map(letters, labels), default=0)
    wide = max(1, min(S, width - margin - 1))
    small = adaptive_max_pool2d(weights[None].float(), (high, wide))[0].sqrt()
    top = small.max().clamp(min=1e-12)
    ticks = "".join(str(-(-i * S // wide)).ljust(10) for i in range(0, wide, 10))
    lines = [" " * margin + " " + ticks[:wide]]
    for label, row in zip(labels, (small / top).tolist(), strict=True):
        lines.append(flush_right(label, margin) + " " + "".join(_cell(cell, 1, colour) for cell in row))
    lines.append(" " * margin + f" {T} × {S}, a letter for {-(-T // high)} × {-(-S // wide)} cells: their largest")
    return "\n".join(line.rstrip() for line in lines)
