"""Connectionist temporal classification (Graves et al., 2006): symbols from audio frames.

Each frame gives a probability to every symbol and to the *blank*. An alignment assigns one of them to each frame; runs
of one symbol count once and blanks not at all, so many alignments give the same symbols. `CTCGreedyDecoder` takes the
most likely alignment; `CTCPrefixBeamDecoder` searches for the most likely symbols, summed over all their alignments.

Both accept log-probabilities in chunks of any size and emit each symbol as soon as it is final.

    T frames   V symbols, including the blank
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from clearhead._core.shapes import Float
from clearhead._core.validation import NonNegativeInt, PositiveInt, validate
from clearhead.errors import DataError, ShapeError


@dataclass(frozen=True)
class CTCSymbol:
    """A recognized symbol.

    Attributes:
        id: The symbol.
        start: First frame of the symbol in the most likely alignment.
        end: Frame after its last one.
        emitted_at: Number of frames received when it was emitted.
        log_prob: Log-probability of its most certain frame.
    """

    id: int
    start: int
    end: int
    emitted_at: int
    log_prob: float


class CTCGreedyDecoder:
    """Takes the most likely symbol of each frame, and emits a symbol when its run ends."""

    def __init__(self, blank: int = 0) -> None:
        self._blank = validate(blank, "blank", NonNegativeInt)
        self._run: CTCSymbol | None = None
        self.n_frames = 0
        self.log_prob = 0.0  # of the alignment so far

    def push(self, log_probs: Float[Tensor, "T V"]) -> list[CTCSymbol]:
        """Process frames and return the symbols that end within them."""
        best = _validate(log_probs, self._blank).max(-1)
        symbols = []
        for id, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            run = self._run
            t = self.n_frames
            if run is not None and id == run.id:
                self._run = replace(run, end=t + 1, log_prob=max(run.log_prob, value))
            else:
                symbols += self._end_run(t + 1)
                self._run = None if id == self._blank else CTCSymbol(id, t, t + 1, t + 1, value)
            self.n_frames += 1
            self.log_prob += value
        return symbols

    def flush(self) -> list[CTCSymbol]:
        """Return the symbol of the last frame, if any."""
        return self._end_run(self.n_frames)

    def _end_run(self, emitted_at: int) -> list[CTCSymbol]:
        """End the current run and return its symbol, if any."""
        run = self._run
        self._run = None
        return [] if run is None else [replace(run, emitted_at=emitted_at)]


_Path = tuple[tuple[int, int, int, float], ...]  # per symbol: id, start, end, largest log-probability


@dataclass(slots=True)
class _Alignments:
    """Alignments of one prefix with the same last frame: their total, the best one, and its path."""

    total: float = -math.inf
    best: float = -math.inf
    path: _Path = ()

    def add(self, other: _Alignments, log_prob: float, path: _Path) -> None:
        """Add the alignments of `other`, extended by one frame."""
        self.total = _logaddexp(self.total, other.total + log_prob)
        if other.best + log_prob > self.best:
            self.best = other.best + log_prob
            self.path = path


class CTCPrefixBeamDecoder:
    """Prefix beam search for the most likely symbols.

    A symbol is emitted when all prefixes agree on it, or when the most likely one contains it and it ended more than
    `patience` frames ago; disagreeing prefixes are then dropped.

    Args:
        width: Number of prefixes kept at every frame.
        blank: Id of the blank.
        patience: Largest delay in frames; None for an exact search, which may wait for the end.
    """

    def __init__(self, width: int = 8, *, blank: int = 0, patience: int | None = 8) -> None:
        self._width = validate(width, "width", PositiveInt)
        self._blank = validate(blank, "blank", NonNegativeInt)
        self._patience = validate(patience, "patience", NonNegativeInt | None)
        # Per prefix (without emitted symbols), most likely first: alignments that end with a blank, after which the
        # last symbol may be repeated, and alignments that end with the last symbol.
        self._beams: dict[tuple[int, ...], tuple[_Alignments, _Alignments]] = {
            (): (_Alignments(0.0, 0.0), _Alignments())
        }
        self._last_id = -1  # of the last emitted symbol
        self._last_end = 0
        self.n_frames = 0

    @property
    def log_prob(self) -> float:
        """Log-probability of the most likely symbols so far, over all their alignments in the beam."""
        return _total(next(iter(self._beams.values())))

    def push(self, log_probs: Float[Tensor, "T V"]) -> list[CTCSymbol]:
        """Process frames and return the symbols that become final."""
        symbols = []
        for frame in _validate(log_probs, self._blank).double().tolist():
            self._step(frame)
            symbols += self._pop_final()
        return symbols

    def flush(self) -> list[CTCSymbol]:
        """Return the remaining symbols of the most likely prefix."""
        beam = next(iter(self._beams.values()))
        path = max(beam, key=lambda alignments: alignments.best).path
        self._beams = {(): (replace(beam[0], path=()), replace(beam[1], path=()))}
        return [self._emit(*symbol) for symbol in path]

    def _emit(self, id: int, start: int, end: int, log_prob: float) -> CTCSymbol:
        """Return a symbol that does not overlap the previous one."""
        # If the search replaced one alignment by another, the latter may have begun the next symbol earlier.
        start = max(start, self._last_end)
        self._last_id = id
        self._last_end = max(end, start + 1)
        return CTCSymbol(id, start, self._last_end, self.n_frames, log_prob)

    def _step(self, frame: Sequence[float]) -> None:
        """Extend all prefixes by one frame."""
        extended: dict[tuple[int, ...], tuple[_Alignments, _Alignments]] = defaultdict(
            lambda: (_Alignments(), _Alignments())
        )
        self.n_frames += 1
        t = self.n_frames
        for prefix, (blank_end, symbol_end) in self._beams.items():
            last = prefix[-1] if prefix else self._last_id
            for id, value in enumerate(frame):
                if id == self._blank:
                    for alignments in (blank_end, symbol_end):
                        extended[prefix][0].add(alignments, value, alignments.path)
                    continue
                if id == last:
                    run = [(id, start, t, max(most, value)) for _, start, _, most in symbol_end.path[-1:]]
                    extended[prefix][1].add(symbol_end, value, (*symbol_end.path[:-1], *run))
                for alignments in (blank_end,) if id == last else (blank_end, symbol_end):
                    extended[*prefix, id][1].add(alignments, value, (*alignments.path, (id, t - 1, t, value)))
        ranked = sorted(extended.items(), key=lambda item: -_total(item[1]))
        self._beams = dict(ranked[: self._width])

    def _pop_final(self) -> list[CTCSymbol]:
        """Remove and return the first symbols that are final."""
        symbols: list[CTCSymbol] = []
        while path := max(next(iter(self._beams.values())), key=lambda alignments: alignments.best).path:
            id, _, end, _ = path[0]
            is_late = self._patience is not None and self.n_frames - end > self._patience
            possible = [prefix for prefix, beam in self._beams.items() if _total(beam) > -math.inf]
            is_agreed = end < self.n_frames and all(prefix[:1] == (id,) for prefix in possible)
            if not is_late and not is_agreed:
                break
            symbols.append(self._emit(*path[0]))
            self._beams = {prefix[1:]: beam for prefix, beam in self._beams.items() if prefix[:1] == (id,)}
            for beam in self._beams.values():
                for alignments in beam:
                    alignments.path = alignments.path[1:]
        return symbols


def _logaddexp(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b))."""
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high)) if high > -math.inf else high


def _total(beam: tuple[_Alignments, _Alignments]) -> float:
    """Return the log-probability of a prefix."""
    return _logaddexp(beam[0].total, beam[1].total)


def decode(log_probs: Float[Tensor, "T V"], *, width: int = 1, blank: int = 0) -> list[CTCSymbol]:
    """Return the symbols of a recording.

    Args:
        log_probs: Log-probabilities of all frames.
        width: 1 for greedy decoding, else the width of an exact prefix beam search.
        blank: Id of the blank.
    """
    decoder = CTCGreedyDecoder(blank) if width == 1 else CTCPrefixBeamDecoder(width, blank=blank, patience=None)
    return [*decoder.push(log_probs), *decoder.flush()]


def _validate(log_probs: Tensor, blank: int) -> Tensor:
    """Return detached log-probabilities; raise for a wrong shape or NaN."""
    if log_probs.dim() != 2 or log_probs.shape[1] <= blank:
        raise ShapeError(
            f"got shape {tuple(log_probs.shape)}; expected log-probabilities (frames, symbols) with blank id {blank}"
        )
    if bool(log_probs.isnan().any()):
        raise DataError("the log-probabilities contain NaN; expected log_softmax of a model's logits")
    return log_probs.detach()
