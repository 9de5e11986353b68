"""Attention maps of single layers, and a pattern label for each head.

A map computes its weights in blocks of rows, so that a long run is displayed without all of its T×T matrices in memory.
All views (terminal, figure, page) take maps, and one can be built from any tensor of weights:
`AttentionMap.of(weights, rows, columns)`.

A head is described by simple patterns with scores from 0 to 1. The score of a pattern that selects keys (the previous
token, the first, …) is the share of the weight on those keys. "broad" is the effective number of keys (e to the
entropy) divided by the number of visible keys. The label of a head is its best pattern if that scores at least one
half, and "mixed" otherwise; a pattern that fewer than half of the queries can follow is no label. In cross-attention,
"diagonal" is the key at the query's relative position, "one before" and "one after" are its neighbors, and "near
diagonal" is the label of a head that divides its attention among these three. H heads, T queries, S keys.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from clearhead._core.shapes import Bool, Float
from clearhead.analysis.measures import check_labels, entropy, mean_attention_distance
from clearhead.errors import ConfigError

LABEL_THRESHOLD = 0.5
MIXED = "mixed"
NEAR_DIAGONAL = "near diagonal"  # contains other patterns, so it is a label only if none of them is
WEIGHTS_PER_BLOCK = 1 << 22

TokenNames = Sequence[str] | None


@dataclass(frozen=True)
class HeadLabel:
    """The label of a head, and the score of every pattern.

    Args:
        name: The label, such as "previous token".
        scores: Score of every pattern.
    """

    name: str
    scores: dict[str, float]

    @property
    def score(self) -> float:
        """Score of the label; of the best pattern if the label is "mixed"."""
        return self.scores.get(self.name, max(self.scores.values(), default=0.0))

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f}"


@dataclass(frozen=True)
class LayerSummary:
    """Measures of the heads of one layer, means over the queries."""

    entropy: list[float]  # nats, one per head
    distance: list[float]
    labels: list[HeadLabel]

    @property
    def heads(self) -> list[tuple[HeadLabel, float, float]]:
        """Label, entropy and distance of each head."""
        return list(zip(self.labels, self.entropy, self.distance, strict=True))


@dataclass(frozen=True)
class AxisLayout:
    """Positions of queries and keys, to which patterns refer.

    In self-attention, queries and keys are on one axis (after a cache, queries are at its end), or on one grid of
    patches. In cross-attention they are two axes of lengths T and S, aligned proportionally.
    """

    n_rows: int
    n_columns: int
    cross: bool = False
    grid: tuple[int, int] | None = None  # rows and columns of patches; preceding tokens are outside

    def query_positions(self, start: int, stop: int) -> Float[Tensor, " r"]:
        """Return the position of each query on the axis of keys."""
        rows = torch.arange(start, stop, dtype=torch.float32)
        if self.cross:
            return rows * (max(self.n_columns - 1, 0) / max(self.n_rows - 1, 1))
        return rows + self.n_columns - self.n_rows

    def distances(self, start: int, stop: int) -> Float[Tensor, "r S"]:
        """Return the distance of each key to each query: along the axis, or in patches on the grid."""
        if self._in_line:
            return (self.query_positions(start, stop)[:, None] - torch.arange(self.n_columns)).abs()
        y, x = self._on_grid()
        distances = torch.hypot(y[start:stop, None] - y, x[start:stop, None] - x)
        return distances.nan_to_num(nan=0.0)  # tokens outside the grid have distance 0

    def pattern_keys(self, start: int, stop: int) -> dict[str, Bool[Tensor, "r S"]]:
        """Return the keys that each positional pattern selects, for these queries."""
        ahead = torch.arange(self.n_columns, dtype=torch.float32) - self.query_positions(start, stop)[:, None]
        if self._in_line and self.cross:
            offset = (ahead + 0.5).floor()  # of each key from the one that is nearest to the query's relative position
            neighbors = {"diagonal": offset == 0, "one before": offset == -1, "one after": offset == 1}
            return neighbors | {NEAR_DIAGONAL: offset.abs() <= 1}
        if self._in_line:
            return {"previous token": ahead == -1, "next token": ahead == 1, "diagonal": ahead == 0}
        (y, x), rows, elsewhere = self._on_grid(), slice(start, stop), ahead != 0
        return {
            "diagonal": ~elsewhere,
            "neighbors": (self.distances(start, stop) == 1) & elsewhere,
            "same row": (y[rows, None] == y) & elsewhere,
            "same column": (x[rows, None] == x) & elsewhere,
        }

    @property
    def _in_line(self) -> bool:
        """Whether tokens are on one axis: text, or the frames of a spectrogram, whose grid has one row."""
        return self.grid is None or self.grid == (1, self.n_columns)

    def _on_grid(self) -> tuple[Tensor, Tensor]:
        """Return row and column of every token; NaN, which equals nothing, for tokens outside the grid."""
        rows, columns = self.grid or (0, 0)
        layout = torch.arange(self.n_columns, dtype=torch.float32) - (self.n_columns - rows * columns)
        layout = layout.masked_fill(layout < 0, torch.nan)
        return (layout / columns).floor(), layout % columns


@dataclass
class HeadStats:
    """Measures of the heads of one layer, accumulated over blocks of rows.

    Rows with fewer than two visible keys have no choice and are excluded from the scores. A key is visible if any head
    gives it weight, because a zero in all heads is a mask.
    """

    layout: AxisLayout
    rows: TokenNames = None
    columns: TokenNames = None
    _sums: dict[str, Tensor] = field(default_factory=dict)  # each (2, H): of what is counted, and how often

    def add(self, block: Float[Tensor, "H r S"], start: int) -> None:
        """Add the rows start, start + 1, … of all heads."""
        weights = block.float().cpu()
        stop = start + block.shape[1]
        spread = entropy(weights)
        distances = mean_attention_distance(weights, self.layout.distances(start, stop))
        n_visible = (weights > 0).any(0).sum(-1).expand(weights.shape[:2])  # (H, r)
        has_choice = n_visible >= 2
        for name, keys in self.layout.pattern_keys(start, stop).items():
            # Only rows that have such a key; the first token has no previous one.
            self._count(name, (weights * keys).sum(-1), has_choice & keys.any(-1))
        ends = {"first token": 0, "last token": -1} if self.layout.grid is None else {}
        for name, key in ends.items():
            self._count(name, weights[..., key], has_choice)
        if self.rows is not None and self.columns is not None and self.layout.grid is None:
            same = self._same(self.rows[start:stop], self.columns, start)
            marks = torch.tensor([is_punctuation(token) for token in self.columns]).expand_as(same)
            visible = (weights > 0).any(0)
            for name, keys in (("same token", same), ("punctuation", marks)):
                # Only rows in which such a key is visible.
                self._count(name, (weights * keys).sum(-1), has_choice & (keys & visible).any(-1))
            if not self.layout.cross:  # induction: the token after an earlier occurrence of the query's token
                earlier = same & (
                    torch.arange(self.layout.n_columns) < self.layout.query_positions(start, stop)[:, None]
                )
                following = torch.cat((torch.zeros_like(earlier[:, :1]), earlier[:, :-1]), 1)
                self._count("induction", (weights * following).sum(-1), has_choice)
        self._count("broad", spread.exp() / n_visible.clamp(min=1), has_choice)
        for name, measure in (("entropy", spread), ("distance", distances)):
            self._count(name, measure, torch.ones_like(has_choice))

    def result(self) -> LayerSummary:
        """Return the summary; a pattern that no row could follow has no score."""
        means = {name: (total / count).tolist() for name, (total, count) in self._sums.items() if count.all()}
        spread, distances = means.pop("entropy", []), means.pop("distance", [])
        rare = self._rare_patterns()
        labels = [label_from_scores({name: mean[h] for name, mean in means.items()}, rare) for h in range(len(spread))]
        return LayerSummary(spread, distances, labels)

    def _rare_patterns(self) -> frozenset[str]:
        """Return the patterns that fewer than half of the queries can follow."""
        n_queries = self._sums["broad"][1]
        return frozenset(name for name, (_, count) in self._sums.items() if (2 * count < n_queries).any())

    def _count(self, name: str, scores: Tensor, counted: Tensor) -> None:
        both = torch.stack(((scores * counted).sum(-1), counted.float().sum(-1)))
        self._sums[name] = self._sums[name] + both if name in self._sums else both

    def _same(self, rows: Sequence[str], columns: Sequence[str], start: int) -> Tensor:
        """Return which other keys have the query's own token."""
        number = {token: i for i, token in enumerate((*columns, *rows))}
        queries = torch.tensor([number[token] for token in rows])
        keys = torch.tensor([number[token] for token in columns])
        same = queries[:, None] == keys
        return same if self.layout.cross else same & (self.layout.distances(start, start + len(rows)) > 0)


@dataclass(frozen=True, kw_only=True)
class AttentionMap:
    """The attention of one layer. Weights are computed when they are read.

    Args:
        path: Path of the layer.
        rows: Tokens of the queries.
        columns: Tokens of the keys.
        n_heads: Number of heads.
        compute_rows: Returns the weights (H, r, S) of the queries start … stop.
        layout: Positions of the queries and keys.
        value_norms: Norm of each key's value after the output projection, (H, S), if the values are known.
        difference: Largest difference between recomputed and recorded output, if the output was recorded.
        tolerance: Bound of `difference` that follows from rounding.
    """

    path: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    n_heads: int
    compute_rows: Callable[[int, int], Tensor]  # (start, stop) → (H, r, S)
    layout: AxisLayout
    value_norms: Tensor | None = None  # (H, S): ‖v W_O‖ of each key, if the values are known
    difference: float | None = None  # between recomputed and recorded output
    tolerance: float | None = None

    @classmethod
    def of(
        cls,
        weights: Float[Tensor, "H T S"],
        rows: Sequence[str],
        columns: Sequence[str] | None = None,
        *,
        path: str = "attention",
        cross: bool = False,
        grid: tuple[int, int] | None = None,
        value_norms: Float[Tensor, "H S"] | None = None,
    ) -> AttentionMap:
        """Create a map from a tensor of weights. Without `columns`, keys have the labels of the queries."""
        columns = rows if columns is None else columns
        check_labels(weights, rows, columns)
        H, T, S = weights.shape
        return cls(
            path=path,
            rows=tuple(rows),
            columns=tuple(columns),
            n_heads=H,
            compute_rows=lambda start, stop: weights[:, start:stop],
            layout=AxisLayout(T, S, cross=cross, grid=grid),
            value_norms=value_norms,
        )

    @property
    def kind(self) -> str:
        """Type of attention: "self", "cross" or "image"."""
        if self.layout.grid is not None:
            return "image"
        return "cross" if self.layout.cross else "self"

    @property
    def stack(self) -> str:
        """The stack of the layer: its path, with a star for the layer's number."""
        return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", self.path, count=1)

    @property
    def layer(self) -> int:
        """Number of the layer in its stack; 0 if its path has none."""
        match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self.path)
        return int(match.group(1)) if match else 0

    @property
    def title(self) -> str:
        """Display name of the stack."""
        if self.stack.endswith("cross_attention"):
            return "Cross-attention"
        match = re.fullmatch(r"(?:(encoder|decoder)\.)?blocks\.\*\.attention", self.stack)
        return f"{match[1] or ''} self-attention".strip().capitalize() if match else self.stack

    def row_blocks(self) -> Iterator[tuple[Float[Tensor, "H r S"], int]]:
        """Iterate over all rows in blocks of bounded size, each with the index of its first row."""
        T, S = len(self.rows), len(self.columns)
        step = max(1, WEIGHTS_PER_BLOCK // max(1, self.n_heads * S))
        for start in range(0, T, step):
            yield self.compute_rows(start, min(T, start + step)).detach().float().cpu(), start

    def weights(self, head: int | None = None) -> Float[Tensor, "T S"]:
        """Return the matrix of one head, or the mean over all heads."""
        if head is not None and not 0 <= head < self.n_heads:
            raise ConfigError(f"{self.path} has no head {head}; expected 0 to {self.n_heads - 1}")
        weights = self.all_heads()
        return weights.mean(0) if head is None else weights[head]

    def all_heads(self) -> Float[Tensor, "H T S"]:
        """Return the matrices of all heads."""
        return self.compute_rows(0, len(self.rows)).detach().float().cpu()

    def query_weights(self, i: int) -> Float[Tensor, "H S"]:
        """Return the weights of one query in each head."""
        if not 0 <= i < len(self.rows):
            raise ConfigError(f"{self.path} has no query {i}; expected 0 to {len(self.rows) - 1}")
        return self.compute_rows(i, i + 1)[:, 0].detach().float().cpu()

    @cached_property
    def summary(self) -> LayerSummary:
        """Entropy, distance and label of every head."""
        stats = HeadStats(self.layout, self.rows, self.columns)
        for rows in self.row_blocks():
            stats.add(*rows)
        return stats.result()

    def _repr_html_(self) -> str:
        """Return the page of this layer."""
        from clearhead.analysis.views.report import AttentionReport

        return AttentionReport(title=self.path, maps=[self])._repr_html_()


def classify_head(
    weights: Float[Tensor, "H T S"],
    *,
    rows: TokenNames = None,
    columns: TokenNames = None,
    layout: AxisLayout | None = None,
) -> list[HeadLabel]:
    """Label each head of one layer by the pattern of its weights.

    Args:
        weights: Attention weights, (H, T, S).
        rows: Tokens of the queries. With tokens, "same token", "punctuation" and "induction" are tried too.
        columns: Tokens of the keys; default: those of the queries.
        layout: Positions of queries and keys; default: self-attention.

    Returns:
        One label per head.
    """
    T, S = weights.shape[1:]
    columns = rows if columns is None else columns
    if rows is not None and columns is not None:
        check_labels(weights, rows, columns)
    stats = HeadStats(AxisLayout(T, S) if layout is None else layout, rows, columns)
    stats.add(weights, 0)
    return stats.result().labels


def is_punctuation(token: str) -> bool:
    """Return whether a token is only punctuation, ignoring a tokenizer's representation of blanks."""
    signs = token.strip(" ▁Ġ␣")
    return bool(signs) and all(unicodedata.category(sign).startswith("P") for sign in signs)


def label_from_scores(scores: dict[str, float], rare: Collection[str] = ()) -> HeadLabel:
    """Return the label for these scores, of one text or means over several; patterns in `rare` are not used."""
    eligible = [name for name in scores if name not in rare and name != NEAR_DIAGONAL]
    best = max(eligible, key=lambda name: scores[name], default=MIXED)
    for name in (best, NEAR_DIAGONAL):
        if scores.get(name, 0.0) >= LABEL_THRESHOLD:
            return HeadLabel(name, scores)
    return HeadLabel(MIXED, scores)
