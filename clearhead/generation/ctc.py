"""Symbols out of a sound's frames by connectionist temporal classification (Graves et al., 2006).

Every frame gives each symbol a probability, and one more to the *blank*. An alignment names one of them for each frame;
runs of the same symbol count once and blanks not at all, so that many alignments say the same thing. `GreedyCTC` takes
the likeliest alignment. `PrefixBeam` looks for the likeliest symbols, the sum over all of their alignments.

Both are fed log-probabilities as they come, in any portions, and give each symbol as soon as they are sure of it.

    T frames   V symbols with the blank"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from clearhead._shapes import Float
from clearhead.errors import DataError, ShapeError
from clearhead.values import Count, Natural, checked


@dataclass(frozen=True)
class Symbol:
    """A symbol, the frames `start` … `end` − 1 that say it in the likeliest alignment, and how many frames had come
    when it was given (`known`). `log_prob` is that of the frame that says it most clearly."""

    id: int
    start: int
    end: int
    known: int
    log_prob: float


class GreedyCTC:
    """The likeliest symbol of each frame. A symbol is given when its run is over."""

    def __init__(self, blank: int = 0) -> None:
        self._blank = checked(blank, "blank", Natural)
        self._run: Symbol | None = None
        self.frames, self.log_prob = 0, 0.0  # of the alignment so far

    def feed(self, log_probs: Float[Tensor, "T V"]) -> list[Symbol]:
        """The symbols that are over by the end of these frames."""
        best = _checked(log_probs, self._blank).max(-1)
        found = []
        for id, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            run, at = self._run, self.frames
            if run is not None and id == run.id:
                self._run = replace(run, end=at + 1, log_prob=max(run.log_prob, value))
            else:
                found += self._over(at + 1)
                self._run = None if id == self._blank else Symbol(id, at, at + 1, at + 1, value)
            self.frames += 1
            self.log_prob += value
        return found

    def end(self) -> list[Symbol]:
        """The symbol that the last frame was saying, if any."""
        return self._over(self.frames)

    def _over(self, known: int) -> list[Symbol]:
        run, self._run = self._run, None
        return [] if run is None else [replace(run, known=known)]


_Path = tuple[tuple[int, int, int, float], ...]  # of each symbol: id, start, end, the clearest log-probability


@dataclass(slots=True)
class _Ways:
    """Alignments of one prefix that end alike: the sum of them, the best of them, and where that has its symbols."""

    total: float = -math.inf
    best: float = -math.inf
    path: _Path = ()

    def add(self, other: _Ways, log_prob: float, path: _Path) -> None:
        """The ways of another go on by one frame and end here."""
        self.total = _added(self.total, other.total + log_prob)
        if other.best + log_prob > self.best:
            self.best, self.path = other.best + log_prob, path


class PrefixBeam:
    """The likeliest symbols, by the sum over their alignments, among the `width` likeliest prefixes at every frame.

    A symbol is given when all prefixes agree on it, or when the likeliest one has it and it was over `patience` frames
    ago; the others are then dropped. Without patience (None) the search is exact, and may wait for the end."""

    def __init__(self, width: int = 8, *, blank: int = 0, patience: int | None = 8) -> None:
        self._width, self._blank = checked(width, "width", Count), checked(blank, "blank", Natural)
        self._patience = checked(patience, "patience", Natural | None)
        # By prefix (without the symbols that were given): alignments that end in a blank, after which the last symbol
        # may come again, and alignments that end in the last symbol. Likeliest first.
        self._beams: dict[tuple[int, ...], tuple[_Ways, _Ways]] = {(): (_Ways(0.0, 0.0), _Ways())}
        self._last, self._end = -1, 0  # the symbol that was given last, and its end
        self.frames = 0

    @property
    def log_prob(self) -> float:
        """Of the likeliest symbols so far, over all of their alignments that were found."""
        return _total(next(iter(self._beams.values())))

    def feed(self, log_probs: Float[Tensor, "T V"]) -> list[Symbol]:
        """The symbols that are sure by the end of these frames."""
        found = []
        for frame in _checked(log_probs, self._blank).double().tolist():
            self._step(frame)
            found += self._settled()
        return found

    def end(self) -> list[Symbol]:
        """The rest of the likeliest symbols."""
        ways = next(iter(self._beams.values()))
        path = max(ways, key=lambda one: one.best).path
        self._beams = {(): (replace(ways[0], path=()), replace(ways[1], path=()))}
        return [self._given(*place) for place in path]

    def _given(self, id: int, start: int, end: int, log_prob: float) -> Symbol:
        # Where the search gave up an alignment for another, that one may have begun the next symbol earlier.
        start = max(start, self._end)
        self._last, self._end = id, max(end, start + 1)
        return Symbol(id, start, self._end, self.frames, log_prob)

    def _step(self, frame: Sequence[float]) -> None:
        grown: dict[tuple[int, ...], tuple[_Ways, _Ways]] = defaultdict(lambda: (_Ways(), _Ways()))
        at = self.frames = self.frames + 1
        for prefix, (silent, said) in self._beams.items():
            last = prefix[-1] if prefix else self._last
            for id, value in enumerate(frame):
                if id == self._blank:
                    for ways in (silent, said):
                        grown[prefix][0].add(ways, value, ways.path)
                    continue
                if id == last:
                    run = [(id, start, at, max(most, value)) for _, start, _, most in said.path[-1:]]
                    grown[prefix][1].add(said, value, (*said.path[:-1], *run))
                for ways in (silent,) if id == last else (silent, said):
                    grown[*prefix, id][1].add(ways, value, (*ways.path, (id, at - 1, at, value)))
        self._beams = dict(sorted(grown.items(), key=lambda one: -_total(one[1]))[: self._width])

    def _settled(self) -> list[Symbol]:
        found: list[Symbol] = []
        while path := max(next(iter(self._beams.values())), key=lambda one: one.best).path:
            id, _, end, _ = path[0]
            waited = self._patience is not None and self.frames - end > self._patience
            possible = [prefix for prefix, ways in self._beams.items() if _total(ways) > -math.inf]
            agreed = end < self.frames and all(prefix[:1] == (id,) for prefix in possible)
            if not waited and not agreed:
                break
            found.append(self._given(*path[0]))
            self._beams = {prefix[1:]: ways for prefix, ways in self._beams.items() if prefix[:1] == (id,)}
            for silent, said in self._beams.values():
                silent.path, said.path = silent.path[1:], said.path[1:]
        return found


def _added(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high)) if high > -math.inf else high


def _total(ways: tuple[_Ways, _Ways]) -> float:
    return _added(ways[0].total, ways[1].total)


def decode(log_probs: Float[Tensor, "T V"], *, width: int = 1, blank: int = 0) -> list[Symbol]:
    """The symbols of a whole sound: greedily, or with a `width` by an exact prefix beam."""
    search = GreedyCTC(blank) if width == 1 else PrefixBeam(width, blank=blank, patience=None)
    return [*search.feed(log_probs), *search.end()]


def _checked(log_probs: Tensor, blank: int) -> Tensor:
    if log_probs.dim() != 2 or log_probs.shape[1] <= blank:
        raise ShapeError(
            f"got {tuple(log_probs.shape)}; expected log-probabilities (frames, symbols), of which {blank} is the blank"
        )
    if bool(log_probs.isnan().any()):
        raise DataError("the log-probabilities hold NaN; expected log_softmax of a model's logits")
    return log_probs.detach()
