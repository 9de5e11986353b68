"""A row of a batch is on its own: its neighbours, their order and the luck of the draw must not matter.

B batch   T tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from clearhead.checks.lab import Case, Lab
from clearhead.checks.noise import difference
from clearhead.checks.properties.base import Property, Seen
from clearhead.checks.properties.causality import SPLIT, TIME_FIRST, takes_time_first
from clearhead.checks.properties.padding import place_of


class BatchInvariance(Property):
    """A row alone gives what it gives in a batch, at any place of it."""

    name = "batch invariance"
    done = "ran each row alone and all rows in another order, and compared with the batch"

    def why_not(self, lab: Lab) -> str | None:
        return None

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        whole = lab.out(case.batch())
        B = case.x.shape[0]
        if B < 2:
            return
        for row in range(B):
            alone = lab.out(case.rows(slice(row, row + 1)).batch())
            yield self._seen(lab, alone, whole[row : row + 1], "alone", f"row {row} alone against in the batch")
        order = torch.arange(B).roll(1)
        yield self._seen(lab, lab.out(case.rows(order).batch()), whole[order], "order", "rows in another order")

    def _seen(self, lab: Lab, a: torch.Tensor, b: torch.Tensor, kind: str, what: str) -> Seen:
        return Seen(
            difference=difference(a, b),
            tolerance=lab.tolerance,
            where=what + place_of(a, b, lab.per_token),
            kind=kind,
        )

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        modules = list(lab.module.modules()) if isinstance(lab.module, nn.Module) else []
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules):
            return "batch-norm takes its statistics from the batch, in evaluation too (track_running_stats=False?)"
        if takes_time_first(lab.module):
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
        base, out = lab.out(case.batch()), lab.out(Case(case.x[:, order]).batch())
        wanted = base[:, order] if lab.per_token else base
        where = f"order {order.tolist()}" + place_of(out, wanted, lab.per_token)
        yield Seen(difference=difference(out, wanted), tolerance=lab.tolerance, where=where)

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        if lab.facts.split_by_view:
            return SPLIT
        if lab.facts.wrong_axis:
            return (
                "the softmax runs over the wrong axis: weights must sum to 1 over the keys, the last axis of the scores"
            )
        return "something knows the order: positions are added somewhere, or a reshape mixes the positions"


class Determinism(Property):
    """In evaluation mode, the same input gives the same output."""

    name = "determinism"
    done = "ran the same input three times in evaluation mode"

    def why_not(self, lab: Lab) -> str | None:
        return None

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        base = lab.out(case.batch())
        for again in (2, 3):
            out = lab.out(case.batch())
            where = f"run {again}" + place_of(out, base, lab.per_token)
            yield Seen(difference=difference(out, base), tolerance=_floor(lab), where=where)

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        random = lab.facts.random
        if random:
            return (
                f"dropout (or other noise: {random[0]}) acts in evaluation: F.dropout(x, p) is on unless it is told "
                "training=self.training; use nn.Dropout"
            )
        return "the module keeps a state from one call to the next"


def _floor(lab: Lab) -> float:
    """The tolerance where the module itself is random: its noise cannot be told from rounding by trying."""
    eps = torch.finfo(lab.dtype).eps
    eps = max(eps, torch.finfo(torch.float32).eps) if lab.dtype != torch.float64 else eps
    return 64 * eps * max(1.0, float(lab.exact.double().abs().nan_to_num(0, 0, 0).max()))
