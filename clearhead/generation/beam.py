"""Beam search: the best few beginnings are kept alive at every step, until enough of them have ended.

One `advance` is: continue every live beginning by every id, keep the best, move those that end into the pool
of ended sequences, and close the prompts that are done. What counts as best, as ended and as done is said in
`choices.Beam`.

    P prompts still open   W live beginnings of each   C candidates   n ids so far   V vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ConfigError
from clearhead.generation.choices import Beam
from clearhead.generation.result import Generated
from clearhead.generation.stepper import Stepper, check_logits, no_choice, wide

__all__ = ["beam_search"]


@torch.no_grad()
def beam_search(stepper: Stepper, beam: Beam, *, max_new: int, stops: tuple[int, ...]) -> Generated:
    """The `n_best` sequences that beam search finds for each prompt."""
    _check_penalty(beam, max_new)
    logits = stepper.begin()
    check_logits(logits, stops)
    search = _Search(beam, max_new, stops, logits)
    while True:
        rows = search.advance(logits)
        if not len(rows):
            return search.result()
        if not torch.equal(rows, torch.arange(len(logits), device=rows.device)):
            stepper.reorder(rows)
        logits = stepper.step(search.newest)


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
    """Up to W sequences for each of P prompts, best first; a score of −∞ marks an empty place."""

    scores: Tensor  # (P, W) float64: Σ log p of the live, the final score of the ended
    ids: Tensor  # (P, W, n)
    log_probs: Tensor  # (P, W, n)
    lengths: Tensor  # (P, W)
    finished: Tensor  # (P, W)

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

    def longer(self, n: int) -> _Sequences:
        """With room for n ids each."""
        more = n - self.ids.shape[-1]
        ids, log_probs = (F.pad(x, (0, more)) for x in (self.ids, self.log_probs))
        return _Sequences(self.scores, ids, log_probs, self.lengths, self.finished)

    def best(self, others: _Sequences, width: int) -> _Sequences:
        """The best `width` of these and the others; of equals, the earlier."""
        both = _Sequences(*(torch.cat(pair, dim=1) for pair in zip(self.parts(), others.parts(), strict=True)))
        order = both.scores.sort(dim=1, descending=True, stable=True).indices
        return both.take(order[:, :width])


def _best(x: Tensor, k: int) -> Tensor:
    """(R, k): where the k largest numbers of each row stand, largest first; of equals, the earlier.

    `topk` leaves open which of equals it takes, and in which order: rows that have some are looked at again.
    """
    values, places = x.topk(min(k + 1, x.shape[1]), dim=1)
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -math.inf)).any(1)
    places = places[:, :k]
    if bool(tied.any()):
        x, least = x[tied], values[tied, k - 1 : k]
        among = max(k, int((x >= least).sum(1).max()))
        near = x.topk(among, dim=1).indices.sort(dim=1).values  # all that could be taken, in their own order
        order = x.gather(1, near).sort(dim=1, descending=True, stable=True).indices[:, :k]
        places[tied] = near.gather(1, order)
    return places


class _Search:
    """The state of one search: what is alive, what has ended, and the answers of closed prompts."""

    def __init__(self, beam: Beam, max_new: int, stops: tuple[int, ...], logits: Tensor) -> None:
        B, device = logits.shape[0], logits.device
        self.beam, self.max_new = beam, max_new
        self.filler = stops[0] if stops else 0
        self.stops = torch.tensor(stops, dtype=torch.int64, device=device)
        self.n = 0
        self.open = torch.arange(B, device=device)  # (P,) which prompt each row of the state is
        nothing = logits.new_zeros(B, 1, 0, dtype=wide(logits[:0]).dtype)
        zero = torch.zeros(B, 1, dtype=torch.int64, device=device)
        self.live = _Sequences(zero.double(), nothing.long(), nothing, zero, zero.bool())  # one empty beginning
        self.pool = _Sequences(*(part[:, :0] for part in self.live.parts()))
        self.n_ended = torch.zeros(B, dtype=torch.int64, device=device)
        self.closed: list[_Sequences | None] = [None] * B

    @property
    def newest(self) -> Tensor:
        """(P·W,): the last id of every live beginning."""
        return self.live.ids[:, :, -1].flatten()

    def advance(self, logits: Tensor) -> Tensor:
        """One step. Returns (P·W,) the old row that each new live beginning continues; empty: the search is over."""
        candidates, parent, is_stop = self._candidates(logits)
        self.n += 1
        width, possible = self.beam.width, candidates.scores > -math.inf
        rank = torch.arange(is_stop.shape[1], device=is_stop.device)
        ends = is_stop & possible & (rank < width)  # a stop id ends a sequence only among the best `width`
        self.n_ended += ends.sum(1)
        self._into_pool(candidates, ends, finished=True)
        # Live on: the best that are no stop, in their order. The sort puts them first; an empty place may
        # follow.
        order = (~is_stop & possible).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :width]
        self.live = candidates.take(order)
        self.live.scores.masked_fill_(is_stop.gather(1, order), -math.inf)
        W_old = len(logits) // len(self.open)
        rows = torch.arange(len(self.open), device=order.device)[:, None] * W_old + parent.gather(1, order)
        still = self._close()
        return rows[still].flatten()

    def _candidates(self, logits: Tensor) -> tuple[_Sequences, Tensor, Tensor]:
        """The best continuations of each prompt, best first: (P, C) of them, which of the W each continues,
        is it a stop.
        """
        P, W = self.live.scores.shape
        # As many as give `width` that are no stop: each beginning has at most len(stops) stops among them.
        enough = self.beam.width * (1 + len(self.stops))
        log_probs = wide(logits).log_softmax(-1)
        each = min(enough, logits.shape[-1])
        # Of the logits: rounding makes some log-probabilities equal that they tell apart.
        best = _best(logits, each)
        top, ids = (x.unflatten(0, (P, W)) for x in (log_probs.gather(-1, best), best))  # (P, W, each)
        dead = self.live.scores == -math.inf
        total = (self.live.scores[..., None] + top).masked_fill(dead[..., None], -math.inf).flatten(1)
        self._check(total)
        place = _best(total, min(enough, W * each))  # (P, C)
        scores = total.gather(1, place)
        parent = place.div(each, rounding_mode="floor")
        newest, newest_log_prob = ids.flatten(1).gather(1, place), top.flatten(1).gather(1, place)
        before = self.live.take(parent)
        candidates = _Sequences(
            scores,
            torch.cat((before.ids, newest[..., None]), dim=-1),
            torch.cat((before.log_probs, newest_log_prob[..., None]), dim=-1),
            torch.full_like(newest, self.n + 1),
            torch.zeros_like(newest, dtype=torch.bool),
        )
        return candidates, parent, torch.isin(newest, self.stops)

    def _into_pool(self, sequences: _Sequences, which: Tensor, *, finished: bool) -> None:
        """Adds those of the sequences that `which` (P, W) names, with their final scores."""
        if not bool(which.any()):
            return
        final = sequences.scores / self.n**self.beam.length_penalty
        entering = _Sequences(
            final.masked_fill(~which, -math.inf),
            sequences.ids,
            sequences.log_probs,
            sequences.lengths,
            torch.full_like(sequences.finished, finished),
        )
        self.pool = self.pool.longer(self.n).best(entering, self.beam.width)

    def _close(self) -> Tensor:
        """Takes the prompts that are done out of the state, with their answers. Returns (P,) which were left open."""
        alive = self.live.scores > -math.inf
        done = (self.n_ended >= self.beam.width) | ~alive.any(1) | self._nothing_better_can_come()
        if self.n == self.max_new:
            self._into_pool(self.live, alive & ~done[:, None], finished=False)
            done = torch.ones_like(done)
        if bool(done.any()):
            for prompt, row in zip(self.open[done].tolist(), done.nonzero()[:, 0].tolist(), strict=True):
                self.closed[prompt] = self.pool.prompts(torch.tensor([row], device=done.device))
            self.open, self.n_ended = self.open[~done], self.n_ended[~done]
            self.live, self.pool = self.live.prompts(~done), self.pool.prompts(~done)
        return ~done

    def _nothing_better_can_come(self) -> Tensor:
        """(P,): no live beginning can reach the n_best-th ended score, even if all that follows is certain.

        A continuation adds at most 0 to Σ log p ≤ 0, so its score is highest at the length that divides it most.
        """
        if self.pool.scores.shape[1] < self.beam.n_best:
            return torch.zeros_like(self.n_ended, dtype=torch.bool)
        kindest = self.max_new if self.beam.length_penalty >= 0 else min(self.n + 1, self.max_new)
        reachable = self.live.scores.amax(1) / kindest**self.beam.length_penalty
        bar = self.pool.scores[:, self.beam.n_best - 1]
        return (bar > -math.inf) & (bar >= reachable)

    def _check(self, total: Tensor) -> None:
        # log_softmax gives NaN for every id if any logit is NaN or +∞, or all are −∞.
        wrong = total.isnan().any(1)
        if bool(wrong.any()):
            raise no_choice(int(self.open[wrong.nonzero()[0, 0]]), self.n)

    def result(self) -> Generated:
        """The answers of all prompts, padded to the longest."""
        N = self.beam.n_best
        rows = [self._padded(answer, N) for answer in self.closed if answer is not None]
        scores, ids, log_probs, lengths, finished = (
            torch.cat(column) for column in zip(*(row.parts() for row in rows), strict=True)
        )
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

    def _padded(self, answer: _Sequences, n_best: int) -> _Sequences:
        """Exactly n_best sequences, with room for as many ids as the search has made."""
        answer = answer.longer(self.n)
        missing = n_best - answer.scores.shape[1]
        if missing <= 0:
            return _Sequences(*(part[:, :n_best] for part in answer.parts()))
        scores, ids, log_probs, lengths, finished = answer.parts()
        return _Sequences(
            F.pad(scores, (0, missing), value=-math.inf),
            F.pad(ids, (0, 0, 0, missing)),
            F.pad(log_probs, (0, 0, 0, missing)),
            F.pad(lengths, (0, missing)),
            F.pad(finished, (0, missing)),
        )
