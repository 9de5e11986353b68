"""Beam search: the best few beginnings are kept alive at every step, until enough of them have ended.

One `advance` is: continue every live beginning by every id, keep the best, and put those that end into the pool of
ended sequences. What counts as best, as ended and as done is said in `choices.Beam`. The state is tensors of fixed
shapes that `advance` changes without looking at any number, so that a step can be recorded; the pool of a prompt that
is done does not change any more, and the host, when it looks in, lets such prompts leave where steps are not recorded.

    P prompts in the state   W live beginnings of each   C candidates   N ids at most   V vocabulary"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ConfigError
from clearhead.generation.choices import Beam
from clearhead.generation.fast import Fast
from clearhead.generation.pick import likeliest
from clearhead.generation.recorded import bucket
from clearhead.generation.result import Generated
from clearhead.generation.stepper import Stepper, check_logits, no_choice, wide

__all__ = ["beam_search"]

_AHEAD = 4  # steps that a GPU makes before the host looks in


def beam_search(stepper: Stepper, beam: Beam, *, max_new: int, stops: tuple[int, ...]) -> Generated:
    """The `n_best` sequences that beam search finds for each prompt."""
    _check_penalty(beam, max_new)
    search = _Search(stepper, beam, max_new, stops)
    search.begin()
    search.look()
    if search.is_over:
        if isinstance(stepper, Fast):
            stepper.give_back()
        return search.result()
    advance, leave = search.advance, lambda: None
    if isinstance(stepper, Fast):
        found, advance, leave = stepper.session(("beam", beam, search.room, stops), search)
        assert isinstance(found, _Search)
        found.take_over(search)
        search = found
    try:
        while not search.is_over:
            steps = min(_AHEAD if search.runs_ahead else 1, max_new - search.made)
            for _ in range(steps):
                advance()
            search.made = search.seen + steps
            search.look()
        return search.result()
    finally:
        leave()


def _check_penalty(beam: Beam, max_new: int) -> None:
    """Refuses a power by which scores would be divided to nothing, or by nothing."""
    try:
        divisor = float(max_new) ** beam.length_penalty
    except OverflowError:
        divisor = math.inf
    if not 0 < divisor < math.inf:
        raise ConfigError(
            f"Beam: length_penalty is {beam.length_penalty!r} and max_new {max_new}; expected a power of the length "
            "that a float can hold: usual are 0 to 2"
        )


@dataclass
class _Sequences:
    """W sequences for each of P prompts, best first; a score of −∞ marks an empty place."""

    scores: Tensor  # (P, W) float64: Σ log p of the live, the final score of the ended
    ids: Tensor  # (P, W, N)
    log_probs: Tensor  # (P, W, N)
    lengths: Tensor  # (P, W)
    finished: Tensor  # (P, W)

    @staticmethod
    def empty(P: int, W: int, N: int, dtype: torch.dtype, device: torch.device) -> _Sequences:
        long = torch.zeros(P, W, N, dtype=torch.int64, device=device)
        zero = torch.zeros(P, W, dtype=torch.int64, device=device)
        scores = torch.full((P, W), -math.inf, dtype=torch.float64, device=device)
        return _Sequences(scores, long, long.to(dtype), zero, zero.bool())

    def parts(self) -> tuple[Tensor, ...]:
        return self.scores, self.ids, self.log_probs, self.lengths, self.finished

    def prompts(self, which: Tensor) -> _Sequences:
        """Those of some of the prompts only."""
        return _Sequences(*(part[which] for part in self.parts()))

    def take(self, places: Tensor) -> _Sequences:
        """For each prompt the sequences at `places` (P, W′)."""
        long = places[..., None].expand(*places.shape, self.ids.shape[-1])
        return _Sequences(
            self.scores.gather(1, places),
            self.ids.gather(1, long),
            self.log_probs.gather(1, long),
            self.lengths.gather(1, places),
            self.finished.gather(1, places),
        )

    def copy_(self, other: _Sequences) -> None:
        for mine, given in zip(self.parts(), other.parts(), strict=True):
            mine.copy_(given)


@dataclass
class _Candidates:
    """The best continuations of each prompt, best first, (P, C) each."""

    scores: Tensor  # −∞: none
    parent: Tensor  # which of the live it continues
    ids: Tensor
    log_probs: Tensor


class _Search:
    """The state of one search: what is alive, what has ended, and the answers of prompts that have left."""

    def __init__(self, stepper: Stepper, beam: Beam, max_new: int, stops: tuple[int, ...]) -> None:
        self.stepper, self.beam, self.max_new, self.stops = stepper, beam, max_new, stops
        self.runs_ahead = isinstance(stepper, Fast) and stepper.recordable
        self.filler = stops[0] if stops else 0
        self.room = bucket(max_new) if self.runs_ahead else max_new  # ids that a sequence has room for
        self.made = self.seen = 0  # steps, and those that the host has looked at
        self.is_over = False

    @torch.no_grad()
    def begin(self) -> None:
        """Reads the prompts; the first ids of their beginnings."""
        logits = self.stepper.begin()
        check_logits(logits, self.stops)
        P, W, device = logits.shape[0], self.beam.width, logits.device
        self.n_prompts = getattr(self.stepper, "n_prompts", P)
        dtype = wide(logits[:0]).dtype
        self.live, self.pool, self.answers = (_Sequences.empty(P, W, self.room, dtype, device) for _ in range(3))
        self.stop_ids = torch.tensor(self.stops, dtype=torch.int64, device=device)
        self.n = torch.zeros(1, dtype=torch.int64, device=device)
        self.open = torch.arange(P, device=device)  # (P,) which prompt each row of the state is
        self.done = self.open >= self.n_prompts
        self.n_ended = torch.zeros(P, dtype=torch.int64, device=device)
        self.wrong_at = torch.full((P,), -1, device=device)  # the step at which no id could be chosen
        # n**length_penalty as Python computes it, for every n
        powers = [1.0, *(float(min(n, self.max_new)) ** self.beam.length_penalty for n in range(1, self.room + 2))]
        self.divisors = torch.tensor(powers, dtype=torch.float64, device=device)
        self.start = torch.arange(P, device=device)[:, None] * W
        self._take_in(logits, torch.zeros(P, 1, dtype=torch.float64, device=device))
        if isinstance(self.stepper, Fast):
            self.stepper.branch(W)
        else:
            self.stepper.reorder(self.open.repeat_interleave(W))

    @torch.no_grad()
    def advance(self) -> None:
        """One more id for every beginning that is alive."""
        newest = self.live.ids.gather(2, (self.n - 1).expand(*self.live.scores.shape, 1)).flatten()
        parent = self._take_in(self.stepper.step(newest), self.live.scores)
        rows = (self.start + parent).flatten()
        if self.runs_ahead or not torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            self.moved = rows
            if self.runs_ahead:
                self.stepper.reorder(rows)
        else:
            self.moved = None

    moved: Tensor | None = None
    """The reordering that the next look brings to the stepper, together with that of prompts that leave."""

    def _take_in(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Continues beginnings with these scores (P, W or 1) by their logits; which of them each new one continues."""
        found = self._candidates(logits, scores)
        width = self.beam.width
        possible = found.scores > -math.inf
        is_stop = (found.ids[..., None] == self.stop_ids).any(-1)
        rank = torch.arange(is_stop.shape[1], device=is_stop.device)
        # A stop id ends a sequence only among the best `width`.
        ends = is_stop & possible & (rank < width) & ~self.done[:, None]
        here = self.n.expand(*self.live.scores.shape, 1).clone()
        self.n += 1
        self.n_ended += ends.sum(1)
        final = (found.scores / self.divisors[self.n]).masked_fill(~ends, -math.inf)
        self._into_pool(final, found, here)
        # Live on: the best that are no stop, in their order. The sort puts them first; an empty place may follow.
        order = (~is_stop & possible).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :width]
        parent = found.parent.gather(1, order)
        live = self.live.take(parent)
        live.scores = found.scores.gather(1, order).masked_fill(is_stop.gather(1, order), -math.inf)
        live.ids.scatter_(2, here, found.ids.gather(1, order)[..., None])
        live.log_probs.scatter_(2, here, found.log_probs.gather(1, order)[..., None])
        self.live.copy_(live)
        alive = (self.live.scores > -math.inf).any(1)
        self.done.logical_or_((self.n_ended >= width) | ~alive | self._nothing_better_can_come())
        return parent

    def _candidates(self, logits: Tensor, scores: Tensor) -> _Candidates:
        P, W = scores.shape
        width = self.beam.width
        # As many as give `width` that are no stop: each beginning has at most len(stops) stops among them.
        enough = width * (1 + len(self.stops))
        each = min(enough, logits.shape[-1])
        # Of the logits: rounding makes some log-probabilities equal that they tell apart.
        best, top = likeliest(logits, each, recordable=self.runs_ahead)
        ids, top = (x.unflatten(0, (P, W)) for x in (best, top))  # (P, W, each)
        dead = scores == -math.inf
        total = (scores[..., None] + top).masked_fill(dead[..., None], -math.inf).flatten(1)
        # Log-probabilities are NaN for every id if any logit is NaN or +∞, or all are −∞.
        wrong = total.isnan().any(1) & ~self.done & (self.wrong_at < 0)
        self.wrong_at.copy_(torch.where(wrong, self.n, self.wrong_at))
        ordered = total.sort(dim=1, descending=True, stable=True)
        place, scores = (x[:, :enough] for x in (ordered.indices, ordered.values))  # (P, C)
        parent = place.div(each, rounding_mode="floor")
        ids, top = ids.flatten(1).gather(1, place), top.flatten(1).gather(1, place)
        if (missing := width - place.shape[1]) > 0:  # a vocabulary smaller than the beam
            scores = F.pad(scores, (0, missing), value=-math.inf)
            parent, ids, top = (F.pad(x, (0, missing)) for x in (parent, ids, top))
        return _Candidates(scores, parent, ids, top)

    def _into_pool(self, final: Tensor, found: _Candidates, here: Tensor) -> None:
        """The best W of the pool and of the candidates with these final scores (P, C); of equals, the earlier."""
        width = self.beam.width
        ordered = torch.cat((self.pool.scores, final), dim=1).sort(dim=1, descending=True, stable=True)
        place = ordered.indices[:, :width]
        old, new = place.clamp(max=width - 1), (place - width).clamp(min=0)
        stays = place < width
        kept, entering = self.pool.take(old), self.live.take(found.parent.gather(1, new))
        entering.ids.scatter_(2, here, found.ids.gather(1, new)[..., None])
        entering.log_probs.scatter_(2, here, found.log_probs.gather(1, new)[..., None])
        long = stays[..., None]
        self.pool.copy_(
            _Sequences(
                ordered.values[:, :width],
                torch.where(long, kept.ids, entering.ids),
                torch.where(long, kept.log_probs, entering.log_probs),
                torch.where(stays, kept.lengths, self.n),
                kept.finished | ~stays,
            )
        )

    def _nothing_better_can_come(self) -> Tensor:
        """(P,): no live beginning can reach the n_best-th ended score, even if all that follows is certain.

        A continuation adds at most 0 to Σ log p ≤ 0, so its score is highest at the length that divides it most."""
        kindest = (
            self.divisors[-1:] if self.beam.length_penalty >= 0 else self.divisors[(self.n + 1).clamp(max=self.max_new)]
        )
        bar = self.pool.scores[:, self.beam.n_best - 1]
        return (bar > -math.inf) & (bar >= self.live.scores.amax(1) / kindest)

    # ------------------------------------------------------------------ what the host does

    @torch.no_grad()
    def look(self) -> None:
        """Looks at the numbers: raises where an id had to be chosen from nothing; prompts that are done leave."""
        self.made = self.made or 1
        n_wrong, n_open = torch.stack(((self.wrong_at >= 0).sum(), (~self.done).sum())).tolist()
        if n_wrong:
            at = self.wrong_at.masked_fill(self.wrong_at < 0, self.max_new)
            row = int(at.argmin())
            raise no_choice(int(self.open[row]), int(at[row]))
        self.seen = self.made
        if not n_open or self.made == self.max_new:
            self._finish()
            return
        still = ~self.done
        if self.runs_ahead or n_open == len(still):
            if self.moved is not None and not self.runs_ahead:
                self.stepper.reorder(self.moved)
            return
        self._answer(self.done)
        rows = (
            self.moved if self.moved is not None else torch.arange(still.numel() * self.beam.width, device=still.device)
        )
        self.stepper.reorder(rows.view(-1, self.beam.width)[still].flatten())
        self.live, self.pool = self.live.prompts(still), self.pool.prompts(still)
        self.open, self.n_ended, self.wrong_at = self.open[still], self.n_ended[still], self.wrong_at[still]
        self.done, self.start = self.done[still], self.start[: len(self.open)]

    def _finish(self) -> None:
        """What is alive when `max_new` is reached competes as it is, unfinished."""
        self.is_over = True
        alive = (self.live.scores > -math.inf) & ~self.done[:, None]
        final = (self.live.scores / self.divisors[-1]).masked_fill(~alive, -math.inf)
        places = torch.cat((self.pool.scores, final), dim=1).sort(dim=1, descending=True, stable=True)
        lengths = torch.full_like(self.live.lengths, self.made)
        unfinished = torch.zeros_like(self.live.finished)
        live = _Sequences(final, self.live.ids, self.live.log_probs, lengths, unfinished)
        both = _Sequences(*(torch.cat(pair, dim=1) for pair in zip(self.pool.parts(), live.parts(), strict=True)))
        self.pool.copy_(both.take(places.indices[:, : self.beam.width]))
        self._answer(torch.ones_like(self.done))

    def _answer(self, which: Tensor) -> None:
        """Puts down the answers of the prompts that `which` (P,) names."""
        for mine, given in zip(self.answers.parts(), self.pool.parts(), strict=True):
            mine[self.open[which]] = given[which]

    def result(self) -> Generated:
        """The answers of all prompts, padded to the longest."""
        B, N = self.n_prompts, self.beam.n_best
        scores, ids, log_probs, lengths, finished = (part[:B, :N] for part in self.answers.parts())
        empty = scores == -math.inf
        lengths, finished = lengths.masked_fill(empty, 0), finished & ~empty
        longest = int(lengths.max())
        beyond = torch.arange(longest, device=ids.device) >= lengths[..., None]
        return Generated(
            ids=ids[..., :longest].masked_fill(beyond, self.filler),
            lengths=lengths,
            log_probs=log_probs[..., :longest].masked_fill(beyond, 0.0),
            scores=scores.to(log_probs.dtype),
            finished=finished,
        )

    # ------------------------------------------------------------------ going on in the memory of a recording

    def tensors(self) -> list[Tensor]:
        return [
            *(*self.live.parts(), *self.pool.parts(), *self.answers.parts()),
            *(self.n, self.open, self.done, self.n_ended, self.wrong_at, self.divisors),
        ]

    def take_over(self, other: _Search) -> None:
        """What the host knows of another search, whose tensors have been taken over."""
        self.made, self.seen, self.is_over, self.n_prompts = other.made, other.seen, False, other.n_prompts
        self.max_new = other.max_new
