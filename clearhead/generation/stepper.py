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
        self._steppers, self._sizes = list(steppers), [len(group) for group in members]
        # The place of each row among those of all steppers, one stepper after the other.
        self._at = torch.tensor([place for group in members for place in group]).argsort()

    def begin(self) -> Float[Tensor, "B V"]:
        return self._together([stepper.begin() for stepper in self._steppers])

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        parts = torch.empty_like(ids).index_copy_(0, self._at.to(ids.device), ids).split(self._sizes)
        return self._together([stepper.step(part) for stepper, part in zip(self._steppers, parts, strict=True)])

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        at, ends = self._at[rows.cpu()], torch.tensor(self._sizes).cumsum(0)
        group = torch.bucketize(at, ends, right=True)
        inside = [at[group == g] - (end - size) for g, (end, size) in enumerate(zip(ends, self._sizes, strict=True))]
        kept = [(stepper, own) for stepper, own in zip(self._steppers, inside, strict=True) if len(own)]
        for stepper, own in kept:
            stepper.reorder(own)
        self._steppers, self._sizes = [stepper for stepper, _ in kept], [len(own) for _, own in kept]
        self._at = group.argsort(stable=True).argsort()

    def _together(self, parts: list[Tensor]) -> Tensor:
        """The groups' logits, row by row in the order of the search."""
        return torch.cat(parts).index_select(0, self._at.to(parts[0].device))


class Sliding:
    """Goes on beyond a table of learned positions, `room` of them: each new id is predicted from the last ids that the
    table has rows for. As long as everything fits, one stepper serves. From then on all kept ids stand one place
    further to the left at every step, so that nothing computed for them is true any more: they are read anew.

    `stepper(rows, n)` gives one that is good for n ids after its rows."""

    def __init__(self, rows: Sequence[Tensor], room: int, stepper: Callable[[Sequence[Tensor], int], Stepper]) -> None:
        self._rows = [row[-room:] for row in rows]
        self._room, self._stepper = room, stepper
        self._left = room + 1 - max(len(row) for row in self._rows)  # ids that the usual way is good for
        self._usual: Stepper | None = stepper(self._rows, self._left)

    def begin(self) -> Float[Tensor, "B V"]:
        assert self._usual is not None
        self._left -= 1
        return self._usual.begin()

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        newest = ids.cpu().split(1)
        self._rows = [torch.cat(pair)[-self._room :] for pair in zip(self._rows, newest, strict=True)]
        if self._usual is not None and self._left > 0:
            self._left -= 1
            return self._usual.step(ids)
        self._usual = None  # its memory is free
        return self._stepper(self._rows, 1).begin()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]
        if self._usual is not None:
            self._usual.reorder(rows)
