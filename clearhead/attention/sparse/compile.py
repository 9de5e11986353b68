"""Sparse attention under `torch.compile`: masks as text, keys of plans, and functions evaluated at compile time.

Dynamo passes only constants to a function that runs at compile time. A mask built inside the traced code is not a
constant, but its text is. Of an object created there, such as a `Blocking`, only the default values would be passed, so
a plan key contains its fields."""

from __future__ import annotations

import operator
from typing import TypeAlias

import torch

from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.sparse.cost_model import rates_for
from clearhead.attention.sparse.plan import Blocking, Plan, plan
from clearhead.attention.sparse.registry import PLANS
from clearhead.masks import Atom, Axis, Head, Mask, as_mask, fold, parse
from clearhead.masks.parse import STRUCTURAL_NAMES

PlanKey: TypeAlias = tuple[torch.device, str, tuple[int, int, int], tuple[int, int, int | None, bool, int | None]]
"""Everything that determines a plan: device, text of the mask, (T, S, query offset) and the fields of a `Blocking`."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant_handle(key: PlanKey) -> int:
    """Return the handle of a plan, built while a graph is compiled and kept for the life of the process."""
    return PLANS.pin(plan_from_key(key))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant_beats_sdpa(key: PlanKey, dtypes: tuple[torch.dtype, torch.dtype], work: tuple[int, int, bool]) -> bool:
    """Return whether the plan is predicted to be faster than SDPA, evaluated while a graph is compiled.

    `dtypes` are those of the sparse kernel and of SDPA; `work` is heads, width and backward, as for `beats_sdpa`."""
    from clearhead.attention.sparse.kernel import beats_sdpa  # which imports this module

    sparse_rates, sdpa_rates = (rates_for(key[0], dtype) for dtype in dtypes)
    return beats_sdpa(plan_from_key(key), *work, sparse_rates, sdpa_rates=sdpa_rates)


def plan_key(inputs: AttentionInputs) -> PlanKey | None:
    """Return the key of a call's plan; None unless mask and sizes are constants of the graph."""
    from clearhead.attention.sparse.kernel import blocking_for  # which imports this module

    has_static_sizes = all([is_static(n) for n in (inputs.T, inputs.S, inputs.query_offset)])
    text = static_text(as_mask(inputs.mask)) if has_static_sizes else None
    if text is None:
        return None
    blocking = blocking_for(inputs)
    return (
        inputs.q.device,
        text,
        (inputs.T, inputs.S, inputs.query_offset),
        (
            blocking.query_rows,
            blocking.key_rows,
            blocking.min_dense_columns,
            blocking.dense_causal,
            blocking.long_rows,
        ),
    )


def plan_from_key(key: PlanKey) -> Plan:
    """Return the plan that a key determines."""
    device, mask, (T, S, query_offset), blocking = key
    return plan(parse(mask), T, S, query_offset=query_offset, device=device, blocking=Blocking(*blocking))


def static_text(mask: Mask) -> str | None:
    """Return the mask in the notation of `parse`; None if it contains a tensor or a size that is not a constant."""
    if not mask.is_structural:
        return None
    if not fold(mask, leaf=_is_constant, and_=operator.and_, or_=operator.and_, not_=bool):
        return None
    return mask.to_text()


def is_static(value: int) -> bool:
    """Return whether a size is a constant of the graph that is compiled."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(value)


def _is_constant(atom: Atom) -> bool:
    if isinstance(atom.leaf, Head):
        return True
    if type(atom.leaf).__name__.lower() not in STRUCTURAL_NAMES:
        return False
    if isinstance(atom.leaf, Axis) and static_text(atom.leaf.mask) is None:
        return False
    return all([is_static(argument) for argument in atom.leaf.arguments()])
