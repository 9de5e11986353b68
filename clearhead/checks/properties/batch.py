"""A row of a batch is on its own: its neighbours, their order and the luck of the draw must not matter.

B batch   T tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from clearhead.checks.lab import Case, Lab
from clearhead.checks.properties.base import Property, Seen, compared
from clearhead.checks.properties.causality import TIME_FIRST, takes_time_first
from clearhead.checks.witness import SEEN


class BatchInvariance(Property):
    """A row alone gives what it gives in a batch, at any place of it."""

    name = "batch invariance"
    done = "ran each row alone and all rows in another order, and compared with the batch"

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        whole = lab.plain(case)
        B = case.x.shape[0]
        if B < 2:
            return
        for row in range(B):
            one = slice(row, row + 1)
            alone = lab.first_row(case)[1] if row == 0 else lab.out(case.rows(one).batch())
            yield compared(lab, alone, whole[one], f"row {row} alone against in the batch", "alone")
        order = torch.arange(B).roll(1)
        yield compared(lab, lab.out(case.rows(order).batch()), whole[order], "rows in another order", "order")

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in lab.parts.values()):
            return "batch-norm takes its statistics from the batch, in evaluation too (track_running_stats=False?)"
        if takes_time_first(lab):
            return TIME_FIRST
        return (
            "rows are mixed: a reshape or softmax runs over the batch axis, or something is normalised over the batch"
        )


class PermutationEquivariance(Property):
    """Without positions and without a mask, tokens in another order give the same outputs in that order."""

    name = "permutation equivariance"
    done = "put the tokens into another order and compared the outputs in that order"

    def why_not(self, lab: Lab) -> str | None:
        if not lab.subject.is_sequence:
            return "the module reads no sequence"
        if lab.subject.source is not None:
            return "the module has two inputs, and its target has an order"
        if lab.subject.positions is None:
            return "it is not said whether the module knows positions: give positions=False if it knows none"
        if lab.subject.positions:
            return "the module knows positions, so that order counts"
        if lab.subject.sees is not None and not bool(lab.subject.sees.dense(lab.length).all()):
            return "its mask gives the tokens an order"
        return None

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        order = torch.randperm(case.length, generator=lab.generator)
        if case.length > 1 and bool((order == torch.arange(case.length)).all()):
            order = order.roll(1)
        base, out = lab.plain(case), lab.out(Case(case.x[:, order]).batch())
        yield compared(lab, out, base[:, order] if lab.per_token else base, f"order {order.tolist()}")

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        for fact in ("split_by_view", "wrong_axis"):
            if getattr(lab.facts, fact):
                return SEEN[fact]
        return "something knows the order: positions are added somewhere, or a reshape mixes the positions"


class Determinism(Property):
    """In evaluation mode, the same input gives the same output."""

    name = "determinism"
    done = "ran the same input three times in evaluation mode"

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        # Where the module itself is random, its noise cannot be told from rounding by trying: no measured tolerance.
        tolerance = 64 * torch.finfo(lab.dtype).eps * max(1.0, lab.largest)
        for again in (2, 3):
            yield compared(lab, lab.out(case.batch()), lab.plain(case), f"run {again}", tolerance=tolerance)

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        if lab.facts.random:
            return (
                f"dropout (or other noise: {lab.facts.random[0]}) acts in evaluation: F.dropout(x, p) is on unless it "
                "is told training=self.training; use nn.Dropout"
            )
        return "the module keeps a state from one call to the next"
