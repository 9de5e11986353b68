"""Beam search: the best few beginnings are kept alive at every step, until enough of them have ended.

One `advance` is: continue every live beginning by every id, keep the best, and put those that end into the pool of
ended sequences. What counts as best, as ended and as done is said in `choices.Beam`. The state is tensors of fixed
shapes that `advance` changes without looking at any number, so that a step can be recorded; the pool of a prompt that
is done does not change any more, and the host, when it looks in, lets such prompts leave where steps are not recorded.

    P prompts in the state   W live beginnings of each   C candidates   N ids at most   V vocabulary"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ConfigError
from clearhead.generation.choices import Beam, Generated
from clearhead.generation.fast import Fast
from clearhead.generation.pick import likeliest, wide
from clearhead.generation.stepper import Stepper
from clearhead.generation.walk import Search, no_choice

_AHEAD = 4  # steps that a GPU makes before the host looks in


def beam_search(stepper: Stepper, beam: Beam, max_new: int, stops: tuple[int, ...]) -> Generated:
    """The `n_best` sequences that beam search finds for each prompt."""
    try:
        divisor = float(max_new) ** beam.length_penalty
    except OverflowError:
        divisor = math.inf
    if not 0 < divisor < math.inf:
        raise ConfigError(
            f"Beam: length_penalty is {beam.length_penalty!r} and max_new {max_new}; expected a power of the length "
            "that a float can hold: usual are 0 to 2"
        )
    return _Beams(stepper, beam, max_new, stops).finished(_AHEAD)


class _Sequences(NamedTuple):
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

    def take(self, places: Tensor) -> _Sequences:
        """For each prompt the sequences at `places` (P, W′)."""
        long = places[..., None].expand(*places.shape, self.ids.shape[-1])
        return _Sequences(*(x.gather(1, long if x.dim() == 3 else places) for x in self))

    def copy_(self, other: _Sequences) -> None:
        for mine, given in zip(self, other, strict=True):
            mine.copy_(given)


class _Beams(Search):
    """The state of one search: what is alive, what has ended, and the answers of prompts that have left."""

    def __init__(self, stepper: Stepper, beam: Beam, max_new: int, stops: tuple[int, ...]) -> None:
        super().__init__(stepper, beam, max_new, stops)
        self.beam = beam
        # The reordering that the next look brings to the stepper, together with that of prompts that leave.
        self.moved: Tensor | None = None

    @torch.no_grad()
    def begin(self) -> None:
        logits = self.first_logits()
        P, W, device = len(logits), self.beam.width, logits.device
        dtype = wide(logits[:0]).dtype
        self.live, self.pool, self.answers = (_Sequences.empty(P, W, self.room, dtype, device) for _ in range(3))
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
        newest = self.live.ids.gather(2, (self.n - 1).expand(*self.live.scores.shape, 1)).flatten()
        parent = self._take_in(self.stepper.step(newest), self.live.scores)
        rows = (self.start + parent).flatten()
        if self.runs_ahead:
            self.stepper.reorder(rows)
        else:
            self.moved = None if torch.equal(rows, torch.arange(len(rows), device=rows.device)) else rows

    def _take_in(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Continues beginnings with these scores (P, W or 1) by their logits; which of them each new one continues."""
        scores, parent, ids, log_probs = self._candidates(logits, scores)
        width = self.beam.width
        possible, is_stop = scores > -math.inf, (ids[..., None] == self.stop_ids).any(-1)
        here = self.n.expand(*self.live.scores.shape, 1).clone()
        self.n += 1

        def continued(which: Tensor) -> _Sequences:
            """The candidates at these places (P, W)."""
            made = self.live.take(parent.gather(1, which))
            made.ids.scatter_(2, here, ids.gather(1, which)[..., None])
            made.log_probs.scatter_(2, here, log_probs.gather(1, which)[..., None])
            return made

        # A stop id ends a sequence only among the best `width`.
        first = torch.arange(width, device=ids.device).expand(len(ids), -1)
        ends = (is_stop & possible)[:, :width] & ~self.done[:, None]
        self.n_ended += ends.sum(1)
        final = (scores[:, :width] / self.divisors[self.n]).masked_fill(~ends, -math.inf)
        lengths = self.n.expand(*ends.shape)
        self._into_pool(continued(first)._replace(scores=final, lengths=lengths, finished=ends))
        # Live on: the best that are no stop, in their order. The sort puts them first; an empty place may follow.
        order = (~is_stop & possible).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :width]
        alive = scores.gather(1, order).masked_fill(is_stop.gather(1, order), -math.inf)
        self.live.copy_(continued(order)._replace(scores=alive))
        parent = parent.gather(1, order)
        none_alive = ~(alive > -math.inf).any(1)
        self.done.logical_or_((self.n_ended >= width) | none_alive | self._nothing_better_can_come())
        return parent

    def _candidates(self, logits: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        """The best continuations of each prompt, best first, (P, C) each: their scores (−∞: none), which of the live
        each continues, their ids and log-probabilities."""
        P, W = scores.shape
        width = self.beam.width
        # As many as give `width` that are no stop: each beginning has at most len(stops) stops among them.
        enough = width * (1 + len(self.stops))
        each = min(enough, logits.shape[-1])
        # Of the logits: rounding makes some log-probabilities equal that they tell apart.
        best, top = likeliest(logits, each)
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
        return scores, parent, ids, top

    def _into_pool(self, new: _Sequences) -> None:
        """The best W of the pool and of these, whose scores are final; of equals, the earlier."""
        both = _Sequences(*(torch.cat(pair, dim=1) for pair in zip(self.pool, new, strict=True)))
        order = both.scores.sort(dim=1, descending=True, stable=True).indices
        self.pool.copy_(both.take(order[:, : self.beam.width]))

    def _nothing_better_can_come(self) -> Tensor:
        """(P,): no live beginning can reach the n_best-th ended score, even if all that follows is certain.

        A continuation adds at most 0 to Σ log p ≤ 0, so its score is highest at the length that divides it most."""
        kindest = (
            self.divisors[-1:] if self.beam.length_penalty >= 0 else self.divisors[(self.n + 1).clamp(max=self.max_new)]
        )
        bar = self.pool.scores[:, self.beam.n_best - 1]
        return (bar > -math.inf) & (bar >= self.live.scores.amax(1) / kindest)

    @torch.no_grad()
    def look(self) -> None:
        n_wrong, n_open = torch.stack(((self.wrong_at >= 0).sum(), (~self.done).sum())).tolist()
        if n_wrong:
            at = self.wrong_at.masked_fill(self.wrong_at < 0, self.max_new)
            row = int(at.argmin())
            raise no_choice(int(self.open[row]), int(at[row]))
        self.seen = self.made
        self.is_over = not n_open or self.made == self.max_new
        if self.is_over:
            self._finish()
        if self.is_over or self.runs_ahead:
            return
        still, rows = ~self.done, self.moved
        if n_open < len(still):
            self._answer(self.done)
            rows = torch.arange(len(still) * self.beam.width, device=still.device) if rows is None else rows
            rows = rows.view(-1, self.beam.width)[still].flatten()
            self.live, self.pool = (_Sequences(*(part[still] for part in one)) for one in (self.live, self.pool))
            self.open, self.n_ended, self.wrong_at = self.open[still], self.n_ended[still], self.wrong_at[still]
            self.done, self.start = self.done[still], self.start[: len(self.open)]
        if rows is not None:
            self.stepper.reorder(rows)

    def _finish(self) -> None:
        """What is alive when `max_new` is reached competes as it is, unfinished."""
        alive = (self.live.scores > -math.inf) & ~self.done[:, None]
        final = (self.live.scores / self.divisors[-1]).masked_fill(~alive, -math.inf)
        lengths = torch.full_like(self.live.lengths, self.made)
        self._into_pool(self.live._replace(scores=final, lengths=lengths))
        self._answer(torch.ones_like(self.done))

    def _answer(self, which: Tensor) -> None:
        """Puts down the answers of the prompts that `which` (P,) names."""
        for mine, given in zip(self.answers, self.pool, strict=True):
            mine[self.open[which]] = given[which]

    def result(self) -> Generated:
        B, N = self.n_prompts, self.beam.n_best
        scores, ids, log_probs, lengths, finished = (part[:B, :N] for part in self.answers)
        empty = scores == -math.inf
        lengths = lengths.masked_fill(empty, 0)
        longest = int(lengths.max())
        beyond = torch.arange(longest, device=ids.device) >= lengths[..., None]
        return Generated(
            ids=ids[..., :longest].masked_fill(beyond, self.filler),
            lengths=lengths,
            log_probs=log_probs[..., :longest].masked_fill(beyond, 0.0),
            scores=scores.to(log_probs.dtype),
            finished=finished & ~empty,
        )

    def tensors(self) -> list[Tensor]:
        changing = self.n, self.open, self.done, self.n_ended, self.wrong_at, self.divisors
        return [*self.live, *self.pool, *self.answers, *changing]
