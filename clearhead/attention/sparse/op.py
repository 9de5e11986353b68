"""The gathered way as one operator of torch's: `torch.compile` and autograd see a single node, on every device.

A plan cannot travel through an operator's arguments, so it goes by its number (`Plan.handle`); whoever calls keeps the
plan alive, and so does the node that waits for its backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clearhead._core.tensor_state import runs_triton
from clearhead.attention.sparse import cpu, launch
from clearhead.attention.sparse.cost_model import rates_of
from clearhead.attention.sparse.launch import Problem, unit
from clearhead.attention.sparse.plan import Blocking, Plan, by_handle, pin, plan
from clearhead.masks import parse

_ATEN = torch.ops.aten

Recipe = tuple[Any, ...]
"""A device, the text of a mask, T, S, the offset and the fields of a `Blocking`: all that a plan is made of."""


@torch.compiler.assume_constant_result
def constant_handle(recipe: Recipe) -> int:
    """The number of a plan that is made while a graph is compiled, and kept as long as the process lives."""
    return pin(_follow(recipe))


@torch.compiler.assume_constant_result
def constant_beats_sdpa(recipe: Recipe, dtypes: tuple[torch.dtype, torch.dtype], work: tuple[int, int, bool]) -> bool:
    """Whether gathering promises to be faster, answered while a graph is compiled.

    `dtypes` are that in which it would gather, and that of the fused kernel instead."""
    from clearhead.attention.sparse.kernel import beats_sdpa

    ours, theirs = (rates_of(recipe[0], dtype) for dtype in dtypes)
    return beats_sdpa(_follow(recipe), *work, ours, instead=theirs)


def _follow(recipe: Recipe) -> Plan:
    device, mask, T, S, query_offset, *blocking = recipe
    return plan(parse(mask), T, S, query_offset=query_offset, device=device, blocking=Blocking(*blocking))


# The schemas are written out: torch would read them off the signatures, which a type checker may have wrapped.
@torch.library.custom_op(
    "clearhead::gathered",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? bias, int handle, float scale) -> (Tensor, Tensor)",
)
def gathered(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, handle: int, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, H, T, E) and log-sum-exp (B, H, T), float32 or wider, by the plan with this number."""
    made, problem = by_handle(handle), Problem(q, k, v, bias, scale)
    if runs_triton(q):
        out, lse = _forward_triton(made, problem)
    else:
        with torch.autocast("cpu", enabled=False):  # products of wide numbers stay wide
            out, lse = _forward_cpu(made, problem)
    # As a compiled graph was told; dense kernels lay out theirs as they like.
    return out.contiguous(), lse.contiguous()


@gathered.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, handle: int, scale: float) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


@torch.library.custom_op(
    "clearhead::gathered_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, int handle, float scale,"
        " bool learned) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def gathered_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: int,
    scale: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of a bias that is `learned` (of any other, nothing: a tensor without elements)."""
    made, problem, grad, dbias = by_handle(handle), Problem(q, k, v, bias, scale), unit(grad), q.new_empty(0)
    if runs_triton(q):
        dq, dk, dv = _backward_triton(made, problem, grad, out, lse)
    else:
        sums = q.new_zeros(bias.shape, dtype=problem.wide) if bias is not None and learned else None
        with torch.autocast("cpu", enabled=False):
            dq, dk, dv = _backward_cpu(made, problem, grad, out, lse, sums)
        if bias is not None and sums is not None:
            dbias = sums.to(bias.dtype)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dbias


@gathered_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _handle, _scale, learned = how
    dbias = bias.new_empty(bias.shape) if bias is not None and learned else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    q, k, v, bias, handle, scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, bias, out, lse)
    ctx.handle, ctx.scale = handle, scale
    ctx.set_materialize_grads(False)
    if not torch.compiler.is_compiling():
        ctx.plan = by_handle(handle)  # keeps it


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    q, k, v, bias, out, lse = ctx.saved_tensors
    if grad is None:
        return None, None, None, None, None, None
    learned = bias is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dbias = gathered_backward(grad, q, k, v, bias, out, lse, ctx.handle, ctx.scale, learned)
    return dq, dk, dv, dbias if learned else None, None, None


gathered.register_autograd(_backward, setup_context=_setup)


# -- with Triton ------------------------------------------------------------------------------------------------------


def _forward_triton(plan: Plan, x: Problem) -> tuple[Tensor, Tensor]:
    tiles = launch.tiles_for(x.q.dtype, max(x.D, x.E))
    found = _dense_forward(plan, x)
    if found is not None:
        out, lse = found[0], found[1].contiguous()
    else:
        out = x.q.new_empty((*x.q.shape[:-1], x.E))
        lse = x.q.new_empty(x.q.shape[:-1], dtype=torch.float32)
        if not plan.queries:
            return out.zero_(), lse.fill_(-math.inf)
    for number, lists in enumerate(plan.queries):
        first = found is None and number == 0
        launch.forward(x, lists, tiles.fitting(lists).forward, out, lse, first)
    return out, lse


def _backward_triton(plan: Plan, x: Problem, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = _dense_backward(plan, x, grad, out, lse)
    if found is None:
        # The first piece writes every row; without a piece nothing does.
        make = torch.empty_like if plan.queries else torch.zeros_like
        dq, dk, dv = (make(y, memory_format=torch.contiguous_format) for y in (x.q, x.k, x.v))
    else:
        dq, dk, dv = found
    if not plan.queries:
        return dq, dk, dv
    tiles = launch.tiles_for(x.q.dtype, max(x.D, x.E))
    state = (grad, *launch.prepare(out, grad, lse, x.bias is not None))
    for number, lists in enumerate(plan.queries):
        first = found is None and number == 0
        launch.query_gradient(x, lists, tiles.fitting(lists).query, state, dq, first)
    for number, lists in enumerate(plan.keys):
        first = found is None and number == 0
        launch.key_gradient(x, lists, tiles.fitting(lists).key, state, dk, dv, first)
    return dq, dk, dv


# -- with torch operations --------------------------------------------------------------------------------------------


def _forward_cpu(plan: Plan, x: Problem) -> tuple[Tensor, Tensor]:
    found = _dense_forward(plan, x)
    if found is None:
        out = x.q.new_zeros((*x.q.shape[:-1], x.E), dtype=x.wide)
        lse = x.q.new_full(x.q.shape[:-1], -math.inf, dtype=x.wide)
    else:
        out, lse = (y.to(x.wide).contiguous() for y in found)
    for lists in plan.queries if x.q.numel() else ():
        cpu.forward(x, lists, out.flatten(0, 1), lse.flatten(0, 1))
    return out.to(x.q.dtype), lse


def _backward_cpu(
    plan: Plan, x: Problem, grad: Tensor, out: Tensor, lse: Tensor, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    found = _dense_backward(plan, x, grad, out, lse)
    if found is None:
        dq, dk, dv = (y.new_zeros(y.shape, dtype=x.wide) for y in (x.q, x.k, x.v))
    else:
        dq, dk, dv = (y.to(x.wide).contiguous() for y in found)
    delta = (out.to(x.wide) * grad.to(x.wide)).sum(-1)
    shift = torch.where(lse == -math.inf, math.inf, lse)
    state = (grad.flatten(0, 1), shift.flatten(0, 1), delta.flatten(0, 1))
    into = (dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1))
    for lists in plan.queries if x.q.numel() else ():
        cpu.backward(x, lists, state, into, dbias)
    return dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype)


# -- the dense piece: torch's fused kernels, called so that they give their log-sum-exp too ---------------------------


def _dense_forward(plan: Plan, x: Problem) -> tuple[Tensor, Tensor] | None:
    """out (B, H, T, E) and log-sum-exp (B, H, T), float32."""
    if plan.columns is None and not plan.triangle:
        return None
    q, (k, v), causal = x.q, _dense_keys(plan, x), plan.triangle
    if not q.is_cuda:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=x.scale)
        return out, lse
    found = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=x.scale)
    return found[0], found[1].reshape(q.shape[:-1])


def _dense_backward(
    plan: Plan, x: Problem, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of q, k, v: given the output and log-sum-exp of all pieces merged, exactly those of this piece."""
    if plan.columns is None and not plan.triangle:
        return None
    given = (grad, x.q, *_dense_keys(plan, x), out)
    if not x.q.is_cuda:
        dq, *gradients = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, lse, 0.0, plan.triangle, scale=x.scale
        )
    else:
        seed = torch.zeros((), dtype=torch.int64, device=x.q.device)
        dq, *gradients = _ATEN._scaled_dot_product_cudnn_attention_backward(
            *given, lse.unsqueeze(-1), seed, seed, None, None, None, x.T, given[2].shape[2], 0.0, plan.triangle,
            scale=x.scale,
        )  # fmt: skip
    if x.groups > 1:
        gradients = [part.unflatten(1, (-1, x.groups)).sum(2) for part in gradients]
    if plan.columns is not None:
        wholes = [torch.zeros(y.shape, dtype=dq.dtype, device=dq.device) for y in (x.k, x.v)]
        gradients = [y.index_copy_(2, plan.columns, part) for y, part in zip(wholes, gradients, strict=True)]
    return dq, gradients[0], gradients[1]


def _dense_keys(plan: Plan, x: Problem) -> tuple[Tensor, Tensor]:
    """The keys and values of the dense piece, one head for each of the queries'."""
    k, v = x.k, x.v
    if plan.progression is not None and k.is_cuda:
        chosen = slice(*plan.progression)
        k, v = k[:, :, chosen], v[:, :, chosen]  # views: the kernel steps over the keys between
    elif plan.columns is not None:
        k, v = k.index_select(2, plan.columns), v.index_select(2, plan.columns)
    return (k, v) if x.groups == 1 else (k.repeat_interleave(x.groups, 1), v.repeat_interleave(x.groups, 1))
