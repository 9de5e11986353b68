"""What a search needs of a model: `Stepper`, three methods, and nothing about attention, caches or text.

`adapters.py` makes one from each of this project's models. Any other source of next-id logits can be searched too: give
`search` an object with these methods, or wrap a plain function from ids to logits in `Recompute`. `Grouped` and
`Sliding` are steppers made of others.

    B prompts   R rows at the moment (prompts times beams, without those that are done)   V vocabulary"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.errors import ClearheadError
from clearhead.generation.prompts import padded


class LogitsError(ClearheadError, ArithmeticError):
    """Logits from which no id can be chosen: NaN, +∞, or −∞ everywhere."""


@runtime_checkable
class Stepper(Protocol):
    """A batch of sequences that grow by one id at a time. Logits need not be normalised; −∞ forbids an id."""

    def begin(self) -> Tensor:
        """Reads the prompts; the logits (B, V) of the id after each. Called once, first."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Appends one id (R,) to each row; the logits (R, V) of the id after it."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was. `rows` (R′,) may repeat rows and leave rows out."""
        ...


class Recompute:
    """A `Stepper` from a function of all ids so far, (R, n) → (R, V): no state but the ids themselves."""

    def __init__(self, logits: Callable[[Tensor], Tensor], prompts: Int[Tensor, "B n"]) -> None:
        self._logits = logits
        self._ids = prompts

    def begin(self) -> Float[Tensor, "B V"]:
        """The logits (B, V) of the token after each prompt."""
        return self._logits(self._ids)

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """One more id for each row (R,), and the logits (R, V) of the token after it."""
        self._ids = torch.cat((self._ids, ids[:, None]), dim=1)
        return self._logits(self._ids)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Row i goes on from what row `rows[i]` was, as beam search asks."""
        self._ids = self._ids.index_select(0, rows)


class Grouped:
    """Several steppers as one: for prompts that cannot share a padded batch and yet are to be searched together.

    `members[g]` are the places, among all prompts, of the rows of stepper g, in rising order. That order is kept: of
    two rows of one stepper, the earlier there is the earlier here."""

    def __init__(self, steppers: Sequence[Stepper], members: Sequence[Sequence[int]]) -> None:
        self._steppers = list(steppers)
        # Which stepper each prompt is in, and which row it has there.
        self._group, self._inside = torch.zeros(2, sum(map(len, members)), dtype=torch.int64)
        for g, group in enumerate(members):
            self._group[group], self._inside[group] = g, torch.arange(len(group))

    def begin(self) -> Float[Tensor, "B V"]:
        return self._together([stepper.begin() for stepper in self._steppers])

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        group = self._group.to(ids.device)
        return self._together([stepper.step(ids[group == g]) for g, stepper in enumerate(self._steppers)])

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        rows = rows.cpu()
        group, inside = self._group[rows], self._inside[rows]
        kept = [g for g in range(len(self._steppers)) if bool((group == g).any())]
        self._group, self._inside = torch.empty_like(group), torch.empty_like(inside)
        for new, g in enumerate(kept):
            own = group == g
            self._steppers[g].reorder(inside[own])
            self._group[own] = new
            self._inside[own] = torch.arange(int(own.sum()))
        self._steppers = [self._steppers[g] for g in kept]

    def _together(self, parts: list[Tensor]) -> Tensor:
        """The groups' logits, row by row in the order of the search."""
        starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
        return torch.cat(parts).index_select(0, (starts[self._group] + self._inside).to(parts[0].device))


class Sliding:
    """Goes on beyond a table of learned positions, `room` of them: each new id is predicted from the last ids that the
    table has rows for. As long as everything fits, one stepper serves. From then on all kept ids stand one place
    further to the left at every step, so that nothing computed for them is true any more: they are read anew.

    `stepper(rows, n)` gives one that is good for n ids after its rows."""

    def __init__(self, rows: Sequence[Tensor], room: int, stepper: Callable[[Sequence[Tensor], int], Stepper]) -> None:
        rows = [row[-room:] for row in rows]
        self._room, self._stepper = room, stepper
        self._lengths = torch.tensor([len(row) for row in rows])
        self._ids = padded(rows, left=True)  # (R, T)
        self._left = room + 1 - self._ids.shape[1]  # ids that the usual way is good for
        self._usual: Stepper | None = stepper(rows, self._left)

    def begin(self) -> Float[Tensor, "B V"]:
        assert self._usual is not None
        self._left -= 1
        return self._usual.begin()

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        self._ids = torch.cat((self._ids, ids.cpu()[:, None]), dim=1)[:, -self._room :]
        self._lengths = (self._lengths + 1).clamp(max=self._room)
        if self._usual is not None and self._left > 0:
            self._left -= 1
            return self._usual.step(ids)
        self._usual = None  # its memory is free
        windows = [row[-n:] for row, n in zip(self._ids, self._lengths.tolist(), strict=True)]
        return self._stepper(windows, 1).begin()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        here = rows.cpu()
        self._ids, self._lengths = self._ids.index_select(0, here), self._lengths.index_select(0, here)
        if self._usual is not None:
            self._usual.reorder(rows)
