"""The gathered way as one operator of torch's: `torch.compile` and autograd see a single node, on every device.

A plan cannot travel through an operator's arguments, so it goes by its number (`Plan.handle`); whoever calls keeps the
plan alive, and so does the node that waits for its backward."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from clearhead.attention.kernels import gathered_cpu, gathered_dense, gathered_launch
from clearhead.attention.plan import Blocking, Plan, by_handle, pin, plan
from clearhead.attention.planning.constant import Spelling, read
from clearhead.attention.planning.cost import rates_of

Plain = tuple[int, int, int | None, bool, int | None]
"""The fields of a `Blocking`: of an object made in its graph, the compiler hands on the defaults alone."""


@torch.compiler.assume_constant_result
def constant_handle(spelling: Spelling, T: int, S: int, offset: int, device: torch.device, blocking: Plain) -> int:
    """The number of a plan that is made while a graph is compiled, and kept as long as the process lives."""
    return pin(plan(read(spelling), T, S, offset=offset, device=device, blocking=Blocking(*blocking)))


@torch.compiler.assume_constant_result
def constant_saves(
    spelling: Spelling,
    sizes: tuple[int, int, int],
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    blocking: Plain,
    work: tuple[int, int, bool],
) -> bool:
    """Whether gathering promises to be faster, answered while a graph is compiled: `sizes` are T, S and the offset.

    `dtypes` are that in which it would gather, and that of the fused kernel instead."""
    from clearhead.attention.kernels.gathered import saves

    T, S, offset = sizes
    made = plan(read(spelling), T, S, offset=offset, device=device, blocking=Blocking(*blocking))
    ours, theirs = (rates_of(device, dtype) for dtype in dtypes)
    return saves(made, *work, ours, instead=theirs)


def uses_triton(q: Tensor) -> bool:
    """On a GPU; on the CPU only where Triton's interpreter was asked for, which is how its kernels are tested there."""
    return q.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


# The schemas are written out: torch would read them off the signatures, which a type checker may have wrapped.
@torch.library.custom_op(
    "clearhead::gathered",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? bias, int handle, float scale) -> (Tensor, Tensor)",
)
def gathered(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, handle: int, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, H, T, E) and log-sum-exp (B, H, T), float32 or wider, by the plan with this number."""
    made = by_handle(handle)
    if uses_triton(q):
        out, lse = _forward_triton(made, q, k, v, bias, scale)
    else:
        with torch.autocast("cpu", enabled=False):  # products of wide numbers stay wide
            out, lse = _forward_cpu(made, q, k, v, bias, scale)
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
    made = by_handle(handle)
    dbias = q.new_empty(0)
    if uses_triton(q):
        dq, dk, dv = _backward_triton(made, grad, q, k, v, bias, out, lse, scale)
    else:
        with torch.autocast("cpu", enabled=False):
            wide = torch.promote_types(q.dtype, torch.float32)
            sums = torch.zeros(bias.shape, dtype=wide, device=q.device) if bias is not None and learned else None
            dq, dk, dv = _backward_cpu(made, grad, q, k, v, bias, out, lse, scale, sums)
        if bias is not None and sums is not None:
            dbias = sums.to(bias.dtype)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dbias


@gathered_backward.register_fake
def _(
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


def _forward_triton(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    problem = gathered_launch.Problem(q, k, v, bias, scale)
    tiles = gathered_launch.tiles_for(q.dtype, max(problem.D, problem.E))
    found = _dense_forward(plan, problem.q, problem.k, problem.v, scale)
    if found is not None:
        out, lse = found
        lse = lse.contiguous()
    else:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    first = found is None
    if first and not plan.queries:
        return out.zero_(), lse.fill_(-math.inf)
    for lists in plan.queries:
        patterns = gathered_launch.patterns_of(lists, q.shape[:1], problem.H, q.device)
        gathered_launch.forward(problem, lists, patterns, tiles.fitting(lists).forward, out, lse, first)
        first = False
    return out, lse


def _backward_triton(
    plan: Plan,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = gathered_launch.Problem(q, k, v, bias, scale)
    grad = gathered_launch.unit(grad)
    found = _dense_backward(plan, grad, problem.q, problem.k, problem.v, out, lse, scale)
    if found is None:
        # The first piece writes every row; without a piece nothing does.
        make = torch.empty_like if plan.queries else torch.zeros_like
        dq, dk, dv = (make(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    else:
        dq, dk, dv = found
    if not plan.queries:
        return dq, dk, dv
    tiles = gathered_launch.tiles_for(q.dtype, max(problem.D, problem.E))
    state = (grad, *gathered_launch.prepare(out, grad, lse, bias is not None))
    first = found is None
    for lists in plan.queries:
        patterns = gathered_launch.patterns_of(lists, q.shape[:1], problem.H, q.device)
        tile = tiles.fitting(lists).query
        gathered_launch.query_gradient(problem, lists, patterns, tile, state, dq, first)
        first = False
    first = found is None
    for lists in plan.keys:
        patterns = gathered_launch.patterns_of(lists, q.shape[:1], problem.H, q.device)
        tile = tiles.fitting(lists).key
        gathered_launch.key_gradient(problem, lists, patterns, tile, state, dk, dv, first)
        first = False
    return dq, dk, dv


# -- with torch operations --------------------------------------------------------------------------------------------


def _forward_cpu(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    found = _dense_forward(plan, q, k, v, scale)
    if found is None:
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
    else:
        out, lse = found[0].to(wide), found[1].to(wide).contiguous()
    if not plan.queries or not q.numel():
        return out.to(q.dtype), lse
    out = out.contiguous()
    q_flat, k_flat, v_flat = (x.flatten(0, 1) for x in (q, k, v))
    full_bias = None if bias is None else bias.expand(*q.shape[:-1], k.shape[-2])
    for lists in plan.queries:
        patterns = gathered_launch.patterns_of(lists, q.shape[:1], q.shape[1], q.device)
        gathered_cpu.forward(
            q_flat, k_flat, v_flat, full_bias, scale, lists, patterns, out.flatten(0, 1), lse.flatten(0, 1)
        )
    return out.to(q.dtype), lse


def _backward_cpu(
    plan: Plan,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dbias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    found = _dense_backward(plan, grad, q, k, v, out, lse, scale)
    if found is None:
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    else:
        dq, dk, dv = (x.to(wide).contiguous() for x in found)
    delta = (out.to(wide) * grad.to(wide)).sum(-1)
    full_bias = None if bias is None else bias.expand(*q.shape[:-1], k.shape[-2])
    q_flat, k_flat, v_flat = (x.flatten(0, 1) for x in (q, k, v))
    into = (dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1))
    for lists in plan.queries if q.numel() else ():
        patterns = gathered_launch.patterns_of(lists, q.shape[:1], q.shape[1], q.device)
        gathered_cpu.backward(
            q_flat,
            k_flat,
            v_flat,
            full_bias,
            scale,
            lists,
            patterns,
            grad.flatten(0, 1),
            lse.flatten(0, 1),
            delta.flatten(0, 1),
            into,
            dbias,
        )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# -- the dense piece --------------------------------------------------------------------------------------------------


def _dense_forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    if plan.columns is None and not plan.triangle:
        return None
    k, v = _dense_keys(plan, q, k, v)
    q, k, v = (gathered_launch.unit(x) for x in (q, k, v))  # torch's kernels take that for granted
    return gathered_dense.forward(q, k, v, scale, plan.triangle)


def _dense_backward(
    plan: Plan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    if plan.columns is None and not plan.triangle:
        return None
    grad, q, k_here, v_here = (gathered_launch.unit(x) for x in (grad, q, *_dense_keys(plan, q, k, v)))
    dq, *gradients = gathered_dense.backward(grad, q, k_here, v_here, out, lse, scale, plan.triangle)
    result = []
    for whole, part in zip((k, v), gradients, strict=True):
        groups = q.shape[1] // whole.shape[1]
        if groups > 1:
            part = part.unflatten(1, (-1, groups)).sum(2)
        if plan.columns is not None:
            spread = torch.zeros(whole.shape, dtype=part.dtype, device=part.device)
            part = spread.index_copy_(2, plan.columns, part)
        result.append(part)
    return dq, result[0], result[1]


def _dense_keys(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of the dense piece, one head for each of the queries'."""
    groups = q.shape[1] // k.shape[1]
    if plan.progression is not None and q.is_cuda:
        chosen = slice(*plan.progression)
        k, v = k[:, :, chosen], v[:, :, chosen]  # views: the kernel steps over the keys between
    elif plan.columns is not None:
        k, v = k.index_select(2, plan.columns), v.index_select(2, plan.columns)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return k, v
