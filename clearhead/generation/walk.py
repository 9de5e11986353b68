"""Greedy decoding and sampling: one id after the other, every row on its own.

`Walk` holds the state, `advance` makes one step, `walk` is the iterator over them. No context (`no_grad`,
evaluation mode) outlives a step, so whoever consumes the iterator, or drops it, finds the world as it was.

    B prompts   R rows still being computed   V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.data import draws
from clearhead.generation.choices import Greedy, Sample
from clearhead.generation.filters import draw, probabilities
from clearhead.generation.result import Generated, Step
from clearhead.generation.stepper import Stepper, check_logits, no_choice, wide

__all__ = ["collect", "walk"]

_LUCK = 601  # keeps these random numbers apart from those that data draw


def walk(stepper: Stepper, how: Greedy | Sample, *, max_new: int, stops: tuple[int, ...]) -> Iterator[Step]:
    """Steps until every row has ended, `max_new` at most."""
    state = Walk(stepper, how, stops)
    for step in range(max_new):
        yield state.advance(last=step == max_new - 1)
        if state.done:
            return


def collect(steps: Iterator[Step], stops: tuple[int, ...]) -> Generated:
    """All the steps of a walk as one result."""
    made = list(steps)
    columns = zip(*((s.ids, s.log_probs, s.running) for s in made), strict=True)
    ids, log_probs, running = (torch.stack(column, dim=1) for column in columns)  # (B, T)
    lengths = running.sum(1)
    last = ids.gather(1, lengths[:, None] - 1).squeeze(1)
    return Generated(
        ids=ids[:, None],
        lengths=lengths[:, None],
        log_probs=log_probs[:, None],
        scores=log_probs.sum(1)[:, None],
        finished=torch.isin(last, torch.tensor(stops, dtype=torch.int64, device=last.device))[:, None],
    )


class Walk:
    """A walk in progress. Rows that have ended are filled up, and dropped from the batch once they are half
    of it.
    """

    def __init__(self, stepper: Stepper, how: Greedy | Sample, stops: tuple[int, ...]) -> None:
        self.stepper = stepper
        self.how = how
        self.stops = stops
        self.filler = stops[0] if stops else 0
        self.made = 0
        self.done = False
        self.n_prompts = 0
        self.rows: Tensor | None = None  # (R,) which prompt each row is; None: row i is prompt i
        self.running: Tensor | None = None  # (R,)
        self.newest: Tensor | None = None  # (R,)
        self.stop_ids = torch.tensor(stops, dtype=torch.int64)

    @torch.no_grad()
    def advance(self, *, last: bool = False) -> Step:
        """One more id for every running row; `last`: nothing will follow, so nothing is prepared for it."""
        logits = self._logits()
        ids = self._choose(logits)
        log_probs = _log_prob(logits, ids)
        running = self.running
        assert running is not None  # _logits made it
        step = Step(*self._all_prompts(ids, log_probs, running))
        self.newest = ids
        if self.stops:
            self.running = running & ~torch.isin(ids, self.stop_ids)
        self._take_stock(log_probs, running, last)
        self.made += 1
        return step

    def _logits(self) -> Tensor:
        if self.newest is not None:
            return self.stepper.step(self.newest)
        logits = self.stepper.begin()
        check_logits(logits, self.stops)
        self.n_prompts = logits.shape[0]
        self.running = torch.ones(self.n_prompts, dtype=torch.bool, device=logits.device)
        self.stop_ids = self.stop_ids.to(logits.device)
        return logits

    def _choose(self, logits: Tensor) -> Tensor:
        if not isinstance(self.how, Sample):
            return logits.argmax(-1)
        # A number of each prompt's own: no row's luck depends on how many others there are, or how long.
        rows = torch.arange(self.n_prompts, device=logits.device) if self.rows is None else self.rows
        uniform = draws.uniform64(_LUCK, self.how.seed, self.made, rows)
        return draw(probabilities(logits, self.how), uniform)

    def _all_prompts(self, ids: Tensor, log_probs: Tensor, running: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(R,) → (B,), with fillers for the prompts that have ended."""
        ids = ids.masked_fill(~running, self.filler)
        log_probs = log_probs.masked_fill(~running, 0.0)
        if self.rows is None:
            return ids, log_probs, running
        everyone = (
            ids.new_full((self.n_prompts,), self.filler),
            log_probs.new_zeros(self.n_prompts),
            running.new_zeros(self.n_prompts),
        )
        for whole, part in zip(everyone, (ids, log_probs, running), strict=True):
            whole[self.rows] = part
        return everyone

    def _take_stock(self, log_probs: Tensor, was_running: Tensor, last: bool) -> None:
        """Looks at the numbers once a step: has something gone wrong, is everyone done, is half of the batch idle?"""
        assert self.running is not None
        wrong = ~log_probs.isfinite() & was_running
        n_wrong, n_running = torch.stack((wrong.sum(), self.running.sum())).tolist()
        if n_wrong:
            row = int(wrong.nonzero()[0])
            raise no_choice(row if self.rows is None else int(self.rows[row]), self.made)
        self.done = n_running == 0
        if self.done or last or 2 * n_running > len(self.running):
            return
        kept = self.running.nonzero().squeeze(-1)
        self.stepper.reorder(kept)
        self.rows = kept if self.rows is None else self.rows[kept]
        assert self.newest is not None
        self.newest, self.running = self.newest[kept], self.running[kept]


def _log_prob(logits: Tensor, ids: Tensor) -> Tensor:
    logits = wide(logits)
    return logits.gather(-1, ids[:, None]).squeeze(-1) - logits.logsumexp(-1)
