"""What a search needs of a model: `Stepper`, three methods, and nothing about attention, caches or text.

`adapters.py` makes one from each of this project's models. Any other source of next-id logits can be searched
too: give `search` an object with these methods, or wrap a plain function from ids to logits in `Recompute`.

    B prompts   R rows at the moment (prompts times beams, without those that are done)   V vocabulary"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.errors import ClearheadError, ConfigError, DtypeError, ShapeError

__all__ = ["Grouped", "LogitsError", "Recompute", "Stepper"]


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
        order = torch.tensor([place for group in members for place in group])
        self._group = torch.empty_like(order)
        self._group[order] = torch.tensor([g for g, group in enumerate(members) for _ in group])
        # The row that each prompt has inside its own stepper.
        self._inside = torch.empty_like(order)
        self._inside[order] = torch.tensor([i for group in members for i in range(len(group))])

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


# ---------------------------------------------------------------------- what both searches check


def stop_ids(stop: int | Sequence[int] | None) -> tuple[int, ...]:
    """`stop` as sorted ids, each once: one id, several, or none."""
    ids = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
    for id_ in ids:
        if isinstance(id_, bool) or not isinstance(id_, int) or id_ < 0:
            raise ConfigError(f"stop is {stop!r}; expected an id, several ids, or None for no early end")
    return tuple(sorted(set(ids)))


def check_max_new(max_new: int) -> None:
    if isinstance(max_new, bool) or not isinstance(max_new, int) or max_new < 1:
        raise ConfigError(f"max_new is {max_new!r}; expected a whole number of at least 1: how many ids to add at most")


def check_logits(logits: Tensor, stops: tuple[int, ...]) -> None:
    """Refuses first logits that are no (B, V), and stop ids that no logit stands for."""
    if not logits.is_floating_point():
        raise DtypeError(f"the stepper's logits are {logits.dtype}; expected floating point")
    if logits.dim() != 2 or 0 in logits.shape:
        raise ShapeError(f"the stepper's logits have shape {tuple(logits.shape)}; expected (rows, vocabulary)")
    vocabulary = logits.shape[1]
    if stops and stops[-1] >= vocabulary:
        raise ConfigError(
            f"stop id {stops[-1]} can never be generated: the vocabulary has {vocabulary} ids (0 … {vocabulary - 1})"
        )


def no_choice(row: int, step: int) -> LogitsError:
    return LogitsError(
        f"the logits for new id {step} of prompt {row} (both counted from 0) are NaN, +∞ or all −∞, "
        "and no id can be chosen from them; look for NaN or infinite weights in the model"
    )


def wide(logits: Tensor) -> Tensor:
    """At least float32: log-probabilities are added up."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
