"""Attention maps of single layers, and a pattern label for each head.

A picture gives its weights a block of rows at a time, so that a long run is shown without its T×T matrices ever being
in memory together. Every view (terminal, figure, page) takes pictures, and one can be made from any tensor of weights:
`AttentionMap.of(weights, rows, columns)`.

What a head does is said as far as a few simple patterns can say it, with a score from 0 to 1 for each. For a pattern
that names keys (the previous token, the first, …) it is the share of the weight that those keys get. "broad" is the
number of keys in effect (e to the entropy) as a share of the keys that can be seen. A head is called by its best
pattern if that reaches one half, and "mixed" otherwise. The letters are the design's: H heads, T queries, S keys."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from clearhead._shapes import Bool, Float
from clearhead.errors import ConfigError
from clearhead.look.measures import check_labels, entropy, mean_attention_distance

ENOUGH = 0.5
MIXED = "mixed"
_CELLS_AT_ONCE = 1 << 22

TokenNames = Sequence[str] | None


@dataclass(frozen=True)
class HeadLabel:
    """The name of a head's pattern, and the score of every pattern that was tried."""

    name: str
    scores: dict[str, float]

    @property
    def score(self) -> float:
        """The score of the name; of the best pattern where the name is "mixed"."""
        return max(self.scores.values(), default=0.0)

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f}"


@dataclass(frozen=True)
class LayerSummary:
    """The measures of one layer's heads, means over the queries."""

    entropy: list[float]  # nats, one a head
    distance: list[float]
    labels: list[HeadLabel]

    @property
    def heads(self) -> list[tuple[HeadLabel, float, float]]:
        """Label, entropy and distance of each."""
        return list(zip(self.labels, self.entropy, self.distance, strict=True))


@dataclass(frozen=True)
class Layout:
    """Where queries stand among the keys, which is what patterns are about.

    Queries and keys of self-attention stand in one line (after a cache, queries are at its end), or on one grid of
    patches. In cross-attention they are two lines of lengths T and S, laid along each other."""

    n_rows: int
    n_columns: int
    cross: bool = False
    grid: tuple[int, int] | None = None  # rows and columns of patches; tokens before them stand outside

    def query_positions(self, start: int, stop: int) -> Float[Tensor, " r"]:
        """The place of each of these queries on the line of keys."""
        rows = torch.arange(start, stop, dtype=torch.float32)
        if self.cross:
            return rows * (max(self.n_columns - 1, 0) / max(self.n_rows - 1, 1))
        return rows + self.n_columns - self.n_rows

    def distances(self, start: int, stop: int) -> Float[Tensor, "r S"]:
        """How far each key is from each of these queries: along the line, or on the grid in patches."""
        if self._in_line:
            return (self.query_positions(start, stop)[:, None] - torch.arange(self.n_columns)).abs()
        y, x = self._on_grid()
        apart = torch.hypot(y[start:stop, None] - y, x[start:stop, None] - x)
        return apart.nan_to_num(nan=0.0)  # a token that stands outside the grid is near everything

    def pattern_keys(self, start: int, stop: int) -> dict[str, Bool[Tensor, "r S"]]:
        """The keys that each pattern of places names, for these queries."""
        ahead = torch.arange(self.n_columns, dtype=torch.float32) - self.query_positions(start, stop)[:, None]
        if self._in_line and self.cross:
            return {"diagonal": ahead.abs() <= 1}
        if self._in_line:
            return {"previous token": ahead == -1, "next token": ahead == 1, "diagonal": ahead == 0}
        (y, x), here, elsewhere = self._on_grid(), slice(start, stop), ahead != 0
        return {
            "diagonal": ~elsewhere,
            "neighbours": (self.distances(start, stop) == 1) & elsewhere,
            "same row": (y[here, None] == y) & elsewhere,
            "same column": (x[here, None] == x) & elsewhere,
        }

    @property
    def _in_line(self) -> bool:
        """Text, or the moments of a sound, whose grid is one row of slices of its spectrogram."""
        return self.grid is None or self.grid == (1, self.n_columns)

    def _on_grid(self) -> tuple[Tensor, Tensor]:
        """Row and column of every token; NaN, which equals nothing, for those outside."""
        rows, columns = self.grid or (0, 0)
        layout = torch.arange(self.n_columns, dtype=torch.float32) - (self.n_columns - rows * columns)
        layout = layout.masked_fill(layout < 0, torch.nan)
        return (layout / columns).floor(), layout % columns


@dataclass
class HeadStats:
    """The measures of one layer's heads, added up over blocks of rows.

    For the scores, a row that sees fewer than two keys has no choice and is left out. A key is seen where any head
    gives it weight: one head's zero may be its choice, a zero in all of them is a mask."""

    layout: Layout
    rows: TokenNames = None
    columns: TokenNames = None
    _sums: dict[str, Tensor] = field(default_factory=dict)  # each (2, H): of what is counted, and how often

    def add(self, block: Float[Tensor, "H r S"], start: int) -> None:
        """The rows start, start + 1, … of all heads."""
        weights, stop = block.float().cpu(), start + block.shape[1]
        spread, apart = entropy(weights), mean_attention_distance(weights, self.layout.distances(start, stop))
        seen = (weights > 0).any(0).sum(-1).expand(weights.shape[:2])  # (H, r)
        chooses = seen >= 2
        for name, keys in self.layout.pattern_keys(start, stop).items():
            # Only rows that have such a key: the first token has no previous one.
            self._count(name, (weights * keys).sum(-1), chooses & keys.any(-1))
        ends = {"first token": 0, "last token": -1} if self.layout.grid is None else {}
        for name, key in ends.items():
            self._count(name, weights[..., key], chooses)
        if self.rows is not None and self.columns is not None and self.layout.grid is None:
            same = self._same(self.rows[start:stop], self.columns, start)
            marks = torch.tensor([is_punctuation(token) for token in self.columns]).expand_as(same)
            visible = (weights > 0).any(0)
            for name, keys in (("same token", same), ("punctuation", marks)):
                # Only rows that can see such a key: before the first full stop there is none to look at.
                self._count(name, (weights * keys).sum(-1), chooses & (keys & visible).any(-1))
            if not self.layout.cross:  # an induction head looks at what followed its own token when it stood earlier
                earlier = same & (
                    torch.arange(self.layout.n_columns) < self.layout.query_positions(start, stop)[:, None]
                )
                following = torch.cat((torch.zeros_like(earlier[:, :1]), earlier[:, :-1]), 1)
                self._count("induction", (weights * following).sum(-1), chooses)
        self._count("broad", spread.exp() / seen.clamp(min=1), chooses)
        for name, measure in (("entropy", spread), ("distance", apart)):
            self._count(name, measure, torch.ones_like(chooses))

    def result(self) -> LayerSummary:
        """A pattern that no row could have followed has no score."""
        means = {name: (total / count).tolist() for name, (total, count) in self._sums.items() if count.all()}
        spread, apart = means.pop("entropy", []), means.pop("distance", [])
        labels = [label_from_scores({name: mean[h] for name, mean in means.items()}) for h in range(len(spread))]
        return LayerSummary(spread, apart, labels)

    def _count(self, name: str, scores: Tensor, counted: Tensor) -> None:
        both = torch.stack(((scores * counted).sum(-1), counted.float().sum(-1)))
        self._sums[name] = self._sums[name] + both if name in self._sums else both

    def _same(self, rows: Sequence[str], columns: Sequence[str], start: int) -> Tensor:
        """Keys elsewhere that carry the query's own token."""
        number = {token: i for i, token in enumerate((*columns, *rows))}
        queries, keys = (torch.tensor([number[token] for token in some]) for some in (rows, columns))
        same = queries[:, None] == keys
        return same if self.layout.cross else same & (self.layout.distances(start, start + len(rows)) > 0)


@dataclass(frozen=True, kw_only=True)
class AttentionMap:
    """Who attends to whom in one layer: tokens at both sides, and the weights on demand."""

    path: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    n_heads: int
    compute_rows: Callable[[int, int], Tensor]  # (start, stop) → (H, r, S)
    layout: Layout
    value_norms: Tensor | None = None  # (H, S): ‖v W_O‖ of each key, where the values are known
    difference: float | None = None  # between the recomputed output and the one of the run
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
        """A picture of weights that are at hand. Without `columns`, keys are called as the queries are."""
        columns = rows if columns is None else columns
        check_labels(weights, rows, columns)
        H, T, S = weights.shape
        return cls(
            path=path,
            rows=tuple(rows),
            columns=tuple(columns),
            n_heads=H,
            compute_rows=lambda start, stop: weights[:, start:stop],
            layout=Layout(T, S, cross=cross, grid=grid),
            value_norms=value_norms,
        )

    @property
    def kind(self) -> str:
        """What attends to what: "self", "cross" or "image"."""
        if self.layout.grid is not None:
            return "image"
        return "cross" if self.layout.cross else "self"

    @property
    def stack(self) -> str:
        """The stack it belongs to: its path, with a star for the layer's number."""
        return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", self.path, count=1)

    @property
    def layer(self) -> int:
        """Its number in the stack; 0 where the path has none."""
        found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self.path)
        return int(found.group(1)) if found else 0

    @property
    def title(self) -> str:
        """The stack in words, where its path is one of this project's."""
        if self.stack.endswith("cross_attention"):
            return "Cross-attention"
        found = re.fullmatch(r"(?:(encoder|decoder)\.)?blocks\.\*\.attention", self.stack)
        return f"{found[1] or ''} self-attention".strip().capitalize() if found else self.stack

    def row_blocks(self) -> Iterator[tuple[Float[Tensor, "H r S"], int]]:
        """All rows in blocks of a bounded size, each with the number of its first: weights may be dear to recompute."""
        T, S = len(self.rows), len(self.columns)
        step = max(1, _CELLS_AT_ONCE // max(1, self.n_heads * S))
        for start in range(0, T, step):
            yield self.compute_rows(start, min(T, start + step)).detach().float().cpu(), start

    def weights(self, head: int | None = None) -> Float[Tensor, "T S"]:
        """The whole matrix of one head, or the mean over all of them."""
        if head is not None and not 0 <= head < self.n_heads:
            raise ConfigError(f"{self.path} has no head {head}; expected 0 to {self.n_heads - 1}")
        whole = self.all_heads()
        return whole.mean(0) if head is None else whole[head]

    def all_heads(self) -> Float[Tensor, "H T S"]:
        """The matrices of all heads."""
        return self.compute_rows(0, len(self.rows)).detach().float().cpu()

    def query_weights(self, i: int) -> Float[Tensor, "H S"]:
        """What one query gives to every key, in each head."""
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
        """In a notebook: the page of this layer alone."""
        from clearhead.look.album import AttentionReport

        return AttentionReport(title=self.path, maps=[self])._repr_html_()


def classify_head(
    weights: Float[Tensor, "H T S"],
    *,
    rows: TokenNames = None,
    columns: TokenNames = None,
    layout: Layout | None = None,
) -> list[HeadLabel]:
    """A label for each head of one layer, of self-attention unless `places` says otherwise. With the tokens of queries
    (`rows`) and keys (`columns`, the same unless given), "same token", "punctuation" and "induction" are tried too."""
    T, S = weights.shape[1:]
    columns = rows if columns is None else columns
    if rows is not None and columns is not None:
        check_labels(weights, rows, columns)
    stats = HeadStats(Layout(T, S) if layout is None else layout, rows, columns)
    stats.add(weights, 0)
    return stats.result().labels


def is_punctuation(token: str) -> bool:
    """Whether a token is signs of punctuation alone; what a tokenizer shows a blank as does not count."""
    signs = token.strip(" ▁Ġ␣")
    return bool(signs) and all(unicodedata.category(sign).startswith("P") for sign in signs)


def label_from_scores(scores: dict[str, float]) -> HeadLabel:
    """The label that these scores give, of one text or means over several."""
    best = max(scores, key=lambda name: scores[name], default=MIXED)
    return HeadLabel(best if scores.get(best, 0.0) >= ENOUGH else MIXED, scores)
