"""Greedy decoding and sampling: one id after the other, every row on its own.

`Walk` holds the state as tensors, and `advance` makes one step without looking at any number, so that a step can be
recorded and run ahead of the host. The host looks in every few steps (at every step on a CPU): has something gone
wrong, is everyone done, is half of the batch idle? No context (`no_grad`, evaluation mode) outlives a step, so whoever
consumes the iterator, or drops it, finds the world as it was.

    B prompts   R rows still being computed   V vocabulary"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from clearhead._numbers import runs_triton
from clearhead.data import draws
from clearhead.generation.choices import Greedy, Sample
from clearhead.generation.fast import Fast
from clearhead.generation.filters import draw, probabilities
from clearhead.generation.pick import likeliest, log_probs_of
from clearhead.generation.recorded import bucket
from clearhead.generation.result import Generated, Step
from clearhead.generation.stepper import Stepper, check_logits, no_choice, wide

__all__ = ["collect", "walk"]

_LUCK = 601  # keeps these random numbers apart from those that data draw
_AHEAD, _FAR_AHEAD = 8, 64  # steps that a GPU makes before the host looks in, and where nothing ends a row


def walk(stepper: Stepper, how: Greedy | Sample, *, max_new: int, stops: tuple[int, ...]) -> Iterator[Step]:
    """Steps until every row has ended, `max_new` at most."""
    state, advance, leave = _begun(stepper, how, max_new, stops)
    seen = 0
    try:
        while True:
            for step in range(seen, state.made):
                yield state.step(step)
            seen = state.made
            if state.done or seen == max_new:
                return
            _go_on(state, advance, min(_AHEAD if state.runs_ahead else 1, max_new - seen))
    finally:
        leave()


def collect(stepper: Stepper, how: Greedy | Sample, *, max_new: int, stops: tuple[int, ...]) -> Generated:
    """The same to its end, as one result."""
    state, advance, leave = _begun(stepper, how, max_new, stops)
    try:
        ahead = 1 if not state.runs_ahead else _AHEAD if stops else _FAR_AHEAD
        while not state.done and state.made < max_new:
            _go_on(state, advance, min(ahead, max_new - state.made))
        return state.result()
    finally:
        leave()


def _begun(
    stepper: Stepper, how: Greedy | Sample, max_new: int, stops: tuple[int, ...]
) -> tuple[Walk, Callable[[], None], Callable[[], None]]:
    state = Walk(stepper, how, max_new, stops)
    state.advance()
    state.look()
    if not isinstance(stepper, Fast):
        return state, state.advance, lambda: None
    if state.done or max_new == 1:
        return state, state.advance, stepper.give_back
    constants = (how.temperature, how.top_k, how.top_p, how.min_p) if isinstance(how, Sample) else None
    found, advance, leave = stepper.session(("walk", constants, state.room, stops), state)
    assert isinstance(found, Walk)
    found.take_over(state)
    return found, advance, leave


def _go_on(state: Walk, advance: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        advance()
    state.made = state.seen + steps
    state.look()


class Walk:
    """A walk in progress. Rows that have ended are filled up, and dropped from the batch once they are half
    of it, where steps are not recorded."""

    def __init__(self, stepper: Stepper, how: Greedy | Sample, max_new: int, stops: tuple[int, ...]) -> None:
        self.stepper, self.how, self.stops, self.max_new = stepper, how, stops, max_new
        self.runs_ahead = isinstance(stepper, Fast) and stepper.recordable
        self.filler = stops[0] if stops else 0
        self.room = bucket(max_new) if self.runs_ahead else max_new  # lines that are kept of the results
        self.made = self.seen = 0  # steps, and those that the host has looked at
        self.done = False
        self.rows: Tensor | None = None  # (R,) which prompt each row is; None: row i is prompt i

    @torch.no_grad()
    def advance(self) -> None:
        """One more id for every running row."""
        logits = self.stepper.step(self.newest) if self.made else self._begin()
        ids, log_probs = self._choose(logits)
        self._note(ids, log_probs)
        self.made += 1

    def _note(self, ids: Tensor, log_probs: Tensor) -> None:
        """Writes the step down, and sees who goes on."""
        if self.rows is None and self.runs_ahead and runs_triton(ids) and log_probs.dtype == torch.float32:
            from clearhead.generation.note_triton import launch

            state = self.running, self.newest, self.at, self.ids, self.log_probs, self.ran
            launch(ids, log_probs, state, self.stop_ids, self.filler)
            return
        self._write(self.ids, torch.where(self.running, ids, self.filler))
        self._write(self.log_probs, torch.where(self.running, log_probs, 0.0))
        self._write(self.ran, self.running)
        self.newest.copy_(ids)
        if self.stops:
            self.running.logical_and_((ids[:, None] != self.stop_ids).all(1))
        self.at += 1

    def _begin(self) -> Tensor:
        logits = self.stepper.begin()
        check_logits(logits, self.stops)
        R, device = logits.shape[0], logits.device
        self.n_prompts = getattr(self.stepper, "n_prompts", R)
        self.running = torch.arange(R, device=device) < self.n_prompts
        self.newest = torch.zeros(R, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.ids = torch.full((self.room, R), self.filler, device=device)
        self.log_probs = torch.zeros(self.room, R, dtype=wide(logits[:0]).dtype, device=device)
        self.ran = torch.zeros(self.room, R, dtype=torch.bool, device=device)
        self.stop_ids = torch.tensor(self.stops, dtype=torch.int64, device=device)
        self.luck = torch.zeros(0, device=device)
        if isinstance(self.how, Sample):
            # A number of each prompt's own: no row's luck depends on how many others there are, or how long.
            step, row = torch.arange(self.room)[:, None], torch.arange(R)
            self.luck = draws.uniform64(_LUCK, self.how.seed, step, row).to(device)
        return logits

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.how, Sample):
            ids, log_probs = likeliest(logits, 1, recordable=True)
            return ids.squeeze(1), log_probs.squeeze(1)
        luck = self.luck.index_select(0, self.at).squeeze(0)
        ids = draw(probabilities(logits, self.how), luck if self.rows is None else luck[self.rows])
        return ids, log_probs_of(logits, ids[:, None]).squeeze(1)

    def _write(self, whole: Tensor, row: Tensor) -> None:
        """Puts a row (R,) into line `at` of (room, B); those of prompts that have left keep their fillers."""
        if self.rows is None:
            whole.index_copy_(0, self.at, row[None])
        else:
            whole[self.at, self.rows] = row

    def look(self) -> None:
        """Looks at the numbers: raises where an id had to be chosen from nothing, and drops rows that have ended."""
        strange = ~self.log_probs[self.seen : self.made].isfinite()
        n_wrong, n_running = torch.stack((strange.sum(), self.running.sum())).tolist()
        if n_wrong:
            self._complain()
        self.seen = self.made
        self.done = n_running == 0
        if self.done or self.runs_ahead or self.made == self.max_new or 2 * n_running > len(self.running):
            return
        kept = self.running.nonzero().squeeze(-1)
        self.stepper.reorder(kept)
        self.rows = kept if self.rows is None else self.rows[kept]
        self.newest, self.running = self.newest[kept], self.running[kept]

    def _complain(self) -> None:
        """The first step at which something went wrong, and the first prompt there."""
        strange = ~self.log_probs[: self.made].isfinite()
        step, row = strange.nonzero()[0].tolist()
        raise no_choice(row, step)

    # ------------------------------------------------------------------ what comes out

    def step(self, n: int) -> Step:
        B = self.n_prompts
        return Step(self.ids[n, :B].clone(), self.log_probs[n, :B].clone(), self.ran[n, :B].clone())

    def result(self) -> Generated:
        B = self.n_prompts
        lengths = self.ran[: self.made, :B].sum(0)
        longest = int(lengths.max())
        ids, log_probs = (x[:longest, :B].T.clone() for x in (self.ids, self.log_probs))  # (B, T)
        last = ids.gather(1, lengths[:, None] - 1).squeeze(1)
        return Generated(
            ids=ids[:, None],
            lengths=lengths[:, None],
            log_probs=log_probs[:, None],
            scores=log_probs.sum(1)[:, None],
            finished=torch.isin(last, self.stop_ids)[:, None],
        )

    # ------------------------------------------------------------------ going on in the memory of a recording

    def tensors(self) -> list[Tensor]:
        return [
            *(self.running, self.newest, self.at, self.ids, self.log_probs, self.ran, self.stop_ids, self.luck),
        ]

    def take_over(self, other: Walk) -> None:
        """What the host knows of another walk, whose tensors have been taken over."""
        self.made, self.seen, self.done, self.n_prompts = other.made, other.seen, other.done, other.n_prompts
        self.max_new = other.max_new
