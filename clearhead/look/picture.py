"""A `Picture` of one attention layer: its tokens at both sides, and who attends to whom between them.

A picture gives its weights a block of rows at a time, so that a long run is shown without its T×T matrices ever being
in memory together. Every view (terminal, figure, page) takes pictures, and one can be made from any tensor of weights:
`Picture.of(weights, rows, columns)`. Its letters: H heads, T queries, S keys, r some rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from clearhead._shapes import Float
from clearhead.errors import ConfigError
from clearhead.look.labels import Collector, Places, Summary, Tally
from clearhead.look.measures import check_names

_CELLS_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Who attends to whom in one layer: tokens at both sides, and the weights on demand."""

    path: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    n_heads: int
    block: Callable[[int, int], Tensor]  # (start, stop) → (H, r, S)
    places: Places
    written: Tensor | None = None  # (H, S): ‖v W_O‖ of each key, where the values are known
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
        written: Float[Tensor, "H S"] | None = None,
    ) -> Picture:
        """A picture of weights that are at hand. Without `columns`, keys are called as the queries are."""
        columns = rows if columns is None else columns
        check_names(weights, rows, columns)
        H, T, S = weights.shape
        return cls(
            path=path,
            rows=tuple(rows),
            columns=tuple(columns),
            n_heads=H,
            block=lambda start, stop: weights[:, start:stop],
            places=Places(T, S, offset=0 if cross else S - T, cross=cross, grid=grid),
            written=written,
        )

    @property
    def kind(self) -> str:
        """What attends to what: "self", "cross" or "image"."""
        if self.places.grid is not None:
            return "image"
        return "cross" if self.places.cross else "self"

    @property
    def group(self) -> str:
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
        if self.group.endswith("cross_attention"):
            return "Cross-attention"
        found = re.fullmatch(r"(?:(encoder|decoder)\.)?blocks\.\*\.attention", self.group)
        return f"{found[1] or ''} self-attention".strip().capitalize() if found else self.group

    def walk(self, *collectors: Collector) -> None:
        """All rows once, in blocks of a bounded size, to each collector: weights may be dear to recompute."""
        T, S = len(self.rows), len(self.columns)
        step = max(1, _CELLS_AT_ONCE // max(1, self.n_heads * S))
        for start in range(0, T, step):
            block = self.block(start, min(T, start + step)).detach().float().cpu()
            for collector in collectors:
                collector.add(block, start)

    def weights(self, head: int | None = None) -> Float[Tensor, "T S"]:
        """The whole matrix of one head, or the mean over all of them."""
        if head is not None and not 0 <= head < self.n_heads:
            raise ConfigError(f"{self.path} has no head {head}; expected 0 to {self.n_heads - 1}")
        whole = self.everything()
        return whole.mean(0) if head is None else whole[head]

    def everything(self) -> Float[Tensor, "H T S"]:
        """The matrices of all heads."""
        return self.block(0, len(self.rows)).detach().float().cpu()

    def row(self, i: int) -> Float[Tensor, "H S"]:
        """What one query gives to every key, in each head."""
        if not 0 <= i < len(self.rows):
            raise ConfigError(f"{self.path} has no query {i}; expected 0 to {len(self.rows) - 1}")
        return self.block(i, i + 1)[:, 0].detach().float().cpu()

    @cached_property
    def summary(self) -> Summary:
        """Entropy, distance and label of every head."""
        self.walk(tally := Tally(self.places, self.rows, self.columns))
        return tally.result()

    def _repr_html_(self) -> str:
        """In a notebook: the page of this layer alone."""
        from clearhead.look.album import Album

        return Album(title=self.path, pictures=[self])._repr_html_()
