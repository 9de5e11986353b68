"""What every search does (`Search`), and greedy decoding and sampling: one id after the other, every row on its own.

A search holds its state as tensors, and `advance` makes one step without looking at any number, so that a step can be
recorded and run ahead of the host. The host looks in every few steps (at every step on a CPU): has something gone
wrong, is everyone done, is half of the batch idle? No context (`no_grad`, evaluation mode) outlives a step, so whoever
consumes the iterator, or drops it, finds the world as it was.

    B prompts   R rows still being computed   V vocabulary"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead._numbers import runs_triton
from clearhead.data import draws
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.generation.choices import Generated, Greedy, How, Sample, Step
from clearhead.generation.fast import Fast, bucket
from clearhead.generation.pick import draw, likeliest, log_probs_of, probabilities, wide
from clearhead.generation.stepper import LogitsError, Stepper

_LUCK = 601  # keeps these random numbers apart from those that data draw
_AHEAD, _FAR_AHEAD = 8, 64  # steps that a GPU makes before the host looks in, and where nothing ends a row


class Search(ABC):
    """A search in progress, and the numbers of it that the host has seen."""

    @abstractmethod
    def begin(self) -> None:
        """Makes the tensors, and the first step."""

    @abstractmethod
    def advance(self) -> None:
        """One more id for everything that is alive."""

    @abstractmethod
    def look(self) -> None:
        """Looks at the numbers: raises where an id had to be chosen from nothing, lets go of who is done."""

    @abstractmethod
    def result(self) -> Generated:
        """What has been found, once the search is over."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that `advance` reads and changes."""

    def __init__(self, stepper: Stepper, how: How, max_new: int, stops: tuple[int, ...]) -> None:
        self.stepper, self.stops, self.max_new = stepper, stops, max_new
        self.runs_ahead = isinstance(stepper, Fast) and stepper.record()
        self.filler = stops[0] if stops else 0
        self.room = bucket(max_new) if self.runs_ahead else max_new  # ids that a sequence has room for
        self.made = self.seen = 0  # steps, and those that the host has looked at
        self.is_over = False
        # What a recording depends on; luck is a tensor.
        fixed = dataclasses.replace(how, seed=0) if isinstance(how, Sample) else how
        self.key: Hashable = (fixed, self.room, stops)

    def first_logits(self) -> Tensor:
        """The logits (B, V) after the prompts; refused where they are none, or no logit stands for a stop id."""
        logits = self.stepper.begin()
        if not logits.is_floating_point():
            raise DtypeError(f"the stepper's logits are {logits.dtype}; expected floating point")
        if logits.dim() != 2 or 0 in logits.shape:
            raise ShapeError(f"the stepper's logits have shape {tuple(logits.shape)}; expected (rows, vocabulary)")
        B, V = logits.shape
        if self.stops and self.stops[-1] >= V:
            raise ConfigError(
                f"stop id {self.stops[-1]} can never be generated: the vocabulary has {V} ids (0 … {V - 1})"
            )
        self.n_prompts: int = getattr(self.stepper, "n_prompts", B)
        self.stop_ids = torch.tensor(self.stops, dtype=torch.int64, device=logits.device)
        return logits

    def take_over(self, other: Search) -> None:
        """Goes on with the state of another search, in its own memory."""
        for mine, given in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(given)
        self.made, self.seen, self.is_over = other.made, other.seen, other.is_over
        self.n_prompts, self.max_new = other.n_prompts, other.max_new

    def progress(self, ahead: int) -> Iterator[Any]:
        """The search after its first step and whenever the host has looked in: this one, or one that was recorded."""
        self.begin()
        self.made = 1
        self.look()
        search, advance, leave = self, self.advance, lambda: None
        if isinstance(self.stepper, Fast):
            search, advance, leave = self.stepper.session(self)
        try:
            yield search
            while not search.is_over:
                steps = min(ahead if search.runs_ahead else 1, search.max_new - search.made)
                for _ in range(steps):
                    advance()
                search.made += steps
                search.look()
                yield search
        finally:
            leave()

    def finished(self, ahead: int) -> Generated:
        """What has been found in the end."""
        states = self.progress(ahead)  # lends its memory until the result is made
        return next(state for state in states if state.is_over).result()


def no_choice(row: int, step: int) -> LogitsError:
    return LogitsError(
        f"the logits for new id {step} of prompt {row} (both counted from 0) are NaN, +∞ or all −∞, "
        "and no id can be chosen from them; look for NaN or infinite weights in the model"
    )


def walk(stepper: Stepper, how: Greedy | Sample, max_new: int, stops: tuple[int, ...]) -> Iterator[Step]:
    """Steps until every row has ended, `max_new` at most."""
    seen = 0
    for state in Walk(stepper, how, max_new, stops).progress(_AHEAD):
        for step in range(seen, state.made):
            yield state.step(step)
        seen = state.made


def collect(stepper: Stepper, how: Greedy | Sample, max_new: int, stops: tuple[int, ...]) -> Generated:
    """The same to its end, as one result."""
    return Walk(stepper, how, max_new, stops).finished(_AHEAD if stops else _FAR_AHEAD)


class Walk(Search):
    """A walk in progress. Rows that have ended are filled up, and dropped from the batch once they are half of it,
    where steps are not recorded."""

    def __init__(self, stepper: Stepper, how: Greedy | Sample, max_new: int, stops: tuple[int, ...]) -> None:
        super().__init__(stepper, how, max_new, stops)
        self.how = how
        self.rows: Tensor | None = None  # (R,) which prompt each row is; None: row i is prompt i

    @torch.no_grad()
    def begin(self) -> None:
        logits = self.first_logits()
        R, device = len(logits), logits.device
        self.running = torch.arange(R, device=device) < self.n_prompts
        self.newest = torch.zeros(R, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.ids = torch.full((self.room, R), self.filler, device=device)
        self.log_probs = torch.zeros(self.room, R, dtype=wide(logits[:0]).dtype, device=device)
        self.ran = torch.zeros(self.room, R, dtype=torch.bool, device=device)
        self.luck = torch.zeros(0, device=device)
        if isinstance(self.how, Sample):
            # A number of each prompt's own: no row's luck depends on how many others there are, or how long.
            step, row = torch.arange(self.room)[:, None], torch.arange(R)
            self.luck = draws.uniform64(_LUCK, self.how.seed, step, row).to(device)
        self._note(*self._choose(logits))

    @torch.no_grad()
    def advance(self) -> None:
        self._note(*self._choose(self.stepper.step(self.newest)))

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.how, Sample):
            ids, log_probs = likeliest(logits, 1)
            return ids.squeeze(1), log_probs.squeeze(1)
        luck = self.luck.index_select(0, self.at).squeeze(0)
        ids = draw(probabilities(logits, self.how), luck if self.rows is None else luck[self.rows])
        return ids, log_probs_of(logits, ids[:, None]).squeeze(1)

    def _note(self, ids: Tensor, log_probs: Tensor) -> None:
        """Writes the step down, and sees who goes on."""
        if self.rows is None and self.runs_ahead and runs_triton(ids) and log_probs.dtype == torch.float32:
            from clearhead.generation.note_triton import launch

            state = self.running, self.newest, self.at, self.ids, self.log_probs, self.ran
            return launch(ids, log_probs, state, self.stop_ids, self.filler)
        self._write(self.ids, torch.where(self.running, ids, self.filler))
        self._write(self.log_probs, torch.where(self.running, log_probs, 0.0))
        self._write(self.ran, self.running)
        self.newest.copy_(ids)
        if self.stops:
            self.running.logical_and_((ids[:, None] != self.stop_ids).all(1))
        self.at += 1

    def _write(self, whole: Tensor, row: Tensor) -> None:
        """Puts a row (R,) into line `at` of (room, B); those of prompts that have left keep their fillers."""
        if self.rows is None:
            whole.index_copy_(0, self.at, row[None])
        else:
            whole[self.at, self.rows] = row

    def look(self) -> None:
        strange = ~self.log_probs[self.seen : self.made].isfinite()
        n_wrong, n_running = torch.stack((strange.sum(), self.running.sum())).tolist()
        if n_wrong:
            step, row = strange.nonzero()[0].tolist()
            raise no_choice(row, self.seen + step)
        self.seen = self.made
        self.is_over = n_running == 0 or self.made == self.max_new
        if self.is_over or self.runs_ahead or 2 * n_running > len(self.running):
            return
        kept = self.running.nonzero().squeeze(-1)
        self.stepper.reorder(kept)
        self.rows = kept if self.rows is None else self.rows[kept]
        self.newest, self.running = self.newest[kept], self.running[kept]

    def step(self, n: int) -> Step:
        return Step(*(x[n, : self.n_prompts].clone() for x in (self.ids, self.log_probs, self.ran)))

    def result(self) -> Generated:
        B = self.n_prompts
        lengths = self.ran[: self.made, :B].sum(0)
        longest = int(lengths.max())
        ids, log_probs = (x[:longest, :B].T.clone() for x in (self.ids, self.log_probs))  # (B, T)
        last = ids.gather(1, lengths[:, None] - 1).squeeze(1)
        found = ids, lengths, log_probs, log_probs.sum(1), torch.isin(last, self.stop_ids)
        return Generated(*(x[:, None] for x in found))

    def tensors(self) -> list[Tensor]:
        return [self.running, self.newest, self.at, self.ids, self.log_probs, self.ran, self.stop_ids, self.luck]
