"""Sparse attention by row intervals, as operators of torch and as an autograd function.

The intervals are arguments of the operators and computed by an operator too, so that a compiled graph or a captured
CUDA graph reads the data of its mask at every call. Outside of compiled graphs the kernels are called directly, because
dispatching an operator takes longer than launching its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._core.tensor_state import runs_triton
from clearhead.attention.sparse import interval_cpu
from clearhead.attention.sparse.row_intervals import (
    CONDITION_FIELDS,
    Conditions,
    RowIntervals,
    batch_of,
    compute_row_intervals,
    encode,
    ids_of,
)
from clearhead.attention.sparse.single_backward import single_backward
from clearhead.masks.pair_interval import PairIntervals


def attend_intervals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    rows: RowIntervals,
    scale: float,
    distance_bias: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Return the output (B, H, T, E) outside of graphs."""
    # A mode that records operators must see one. Their arguments cannot describe bounds per query.
    if torch._C._len_torch_dispatch_stack() and not rows.tests_by_query:
        arguments = (q, k, v, bias, rows.bounds, *_ids_arguments(rows), rows.query_offset, scale, distance_bias, cap)
        out: Tensor = interval_attention(*arguments)[0]
        return out
    learns_distance = distance_bias is not None and distance_bias.requires_grad
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or learns_distance):
        result: Tensor = _IntervalAttention.apply(q, k, v, bias, distance_bias, rows, scale, cap)  # type: ignore[no-untyped-call]
        return result
    return _forward(q, k, v, bias, rows, scale, distance_bias, cap)[0]


def attend_intervals_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    intervals: PairIntervals,
    query_offset: int,
    scale: float,
    distance_bias: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Return the output (B, H, T, E) while a graph is compiled; the graph computes the intervals too."""
    conditions = encode(intervals, q.device)
    numbers, tensors = list(conditions.numbers), list(conditions.tensors)
    T, S = q.shape[-2], k.shape[-2]
    bounds = interval_rows(q, tensors, numbers, T, S, query_offset)
    rows = RowIntervals(bounds, ids_of(numbers, tensors), query_offset)
    arguments = (q, k, v, bias, bounds, *_ids_arguments(rows), query_offset, scale, distance_bias, cap)
    out: Tensor = interval_attention(*arguments)[0]
    return out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    rows: RowIntervals,
    scale: float,
    distance_bias: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    arguments = (q, k, v, bias, rows, scale, distance_bias, cap)
    if runs_triton(q):
        from clearhead.attention.sparse.interval_launch import IntervalCall, interval_forward

        return interval_forward(IntervalCall(*arguments))
    with torch.autocast("cpu", enabled=False):  # products stay in the accumulation dtype
        return interval_cpu.forward(interval_cpu.IntervalInputs(*arguments))


def _backward(
    grad: Tensor,
    arguments: tuple[Tensor, Tensor, Tensor, Tensor | None, RowIntervals, float, Tensor | None, float],
    out: Tensor,
    lse: Tensor,
    needs_distance_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if runs_triton(grad):
        from clearhead.attention.sparse.interval_launch import IntervalCall, interval_backward

        return interval_backward(IntervalCall(*arguments), grad, out, lse, needs_distance_grad)
    with torch.autocast("cpu", enabled=False):
        return interval_cpu.backward(interval_cpu.IntervalInputs(*arguments), grad, needs_distance_grad)


class _IntervalAttention(torch.autograd.Function):
    """The kernels as one node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        distance_bias: Tensor | None,
        rows: RowIntervals,
        scale: float,
        cap: float,
    ) -> Tensor:
        out, lse = _forward(q, k, v, bias, rows, scale, distance_bias, cap)
        ctx.save_for_backward(q, k, v, bias, distance_bias, out, lse)
        ctx.rows, ctx.scale, ctx.cap = rows, scale, cap
        return out

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, distance_bias, out, lse = ctx.saved_tensors
        arguments = (q, k, v, bias, ctx.rows, ctx.scale, distance_bias, ctx.cap)
        dq, dk, dv, d_distance = _backward(grad, arguments, out, lse, ctx.needs_input_grad[4])
        return dq, dk, dv, None, d_distance, None, None, None


# -- operators --------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "clearhead::interval_rows",
    mutates_args=(),
    schema=(
        "(Tensor like, Tensor[] tensors, SymInt[] numbers, SymInt n_queries, SymInt n_keys, SymInt query_offset)"
        " -> Tensor"
    ),
)
def interval_rows(
    like: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], n_queries: int, n_keys: int, query_offset: int
) -> Tensor:
    """Return the bounds of `RowIntervals` on the device of `like`."""
    conditions = Conditions(tuple(numbers), tuple(tensors))
    return compute_row_intervals(conditions, n_queries, n_keys, query_offset, like.device).bounds


@interval_rows.register_fake
def _(
    like: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], n_queries: int, n_keys: int, query_offset: int
) -> Tensor:
    sizes = batch_of(numbers, tensors), len(numbers) // CONDITION_FIELDS, 2, n_queries + n_keys
    return like.new_empty(sizes, dtype=torch.int32)


@torch.library.custom_op(
    "clearhead::interval_attention",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor bounds, Tensor? ids, Tensor? ids2,"
        " SymInt query_offset, float scale, Tensor? distance_bias=None, float cap=0.0) -> (Tensor, Tensor)"
    ),
)
def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    bounds: Tensor,
    ids: Tensor | None,
    ids2: Tensor | None,
    query_offset: int,
    scale: float,
    distance_bias: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, T, E) and log-sum-exp (B, H, T), float32 or wider, for these row intervals."""
    out, lse = _forward(q, k, v, bias, _rows(bounds, ids, ids2, query_offset), scale, distance_bias, cap)
    return out.contiguous(), lse  # the layout that the fake implementation declares


@interval_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rows: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


@torch.library.custom_op(
    "clearhead::interval_attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, Tensor bounds,"
        " Tensor? ids, Tensor? ids2, SymInt query_offset, float scale, Tensor? distance_bias=None, float cap=0.0,"
        " bool needs_distance_grad=False) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def interval_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    ids: Tensor | None,
    ids2: Tensor | None,
    query_offset: int,
    scale: float,
    distance_bias: Tensor | None = None,
    cap: float = 0.0,
    needs_distance_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and, if needed, of the bias by distance (else an empty tensor)."""
    arguments = (q, k, v, bias, _rows(bounds, ids, ids2, query_offset), scale, distance_bias, cap)
    dq, dk, dv, d_distance = _backward(grad, arguments, out, lse, needs_distance_grad)
    d_distance = q.new_empty(0, dtype=lse.dtype) if d_distance is None else d_distance
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_distance


@interval_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    distance_bias, _, needs_distance_grad = (*rest, *(None, 0.0, False)[len(rest) - 5 :])[5:]
    size = distance_bias.shape if needs_distance_grad and distance_bias is not None else (0,)
    d_distance = q.new_empty(size, dtype=lse.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_distance


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, bounds, ids, ids2, query_offset, scale, distance_bias, cap = inputs
    ctx.save_for_backward(q, k, v, bias, *output, bounds, ids, ids2, distance_bias)
    ctx.query_offset, ctx.scale, ctx.cap = query_offset, scale, cap
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    n_inputs = len(ctx.needs_input_grad)  # graphs leave out the last arguments if they are the defaults
    if grad is None:
        return (None,) * n_inputs
    q, k, v, bias, out, lse, *rows, distance_bias = ctx.saved_tensors
    needs_distance_grad = distance_bias is not None and ctx.needs_input_grad[9]
    dq, dk, dv, d_distance = interval_attention_backward(
        grad, q, k, v, bias, out, lse, *rows, ctx.query_offset, ctx.scale, distance_bias, ctx.cap, needs_distance_grad
    )
    return (dq, dk, dv, *(None,) * 6, d_distance if needs_distance_grad else None, None)[:n_inputs]


interval_attention.register_autograd(_differentiate, setup_context=_setup_context)


def _ids_arguments(rows: RowIntervals) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of the two intervals."""
    return rows.ids[0], rows.ids[1] if len(rows.ids) > 1 else None


def _rows(bounds: Tensor, ids: Tensor | None, ids2: Tensor | None, query_offset: int) -> RowIntervals:
    """Return the arguments of an operator as one value."""
    return RowIntervals(bounds, (ids, ids2)[: bounds.shape[1]], query_offset)
