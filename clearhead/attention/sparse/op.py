"""Sparse attention by a plan as one torch operator, so that `torch.compile` sees a single node on every device.

A plan cannot be an argument of an operator, so its handle is (`Plan.handle`). The caller keeps the plan alive, and so
does the autograd node until its backward. Outside of compiled graphs the kernels are called directly, because
dispatching an operator takes longer than launching its kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clearhead._core.tensor_state import runs_triton
from clearhead.attention.sparse import cpu, launch
from clearhead.attention.sparse.distance_sums import DistanceSums
from clearhead.attention.sparse.launch import KernelInputs, unit_stride
from clearhead.attention.sparse.plan import Plan
from clearhead.attention.sparse.registry import PLANS
from clearhead.attention.sparse.single_backward import single_backward

_ATEN = torch.ops.aten


# The schemas are explicit: torch would infer them from the signatures, which a runtime type checker may have wrapped.
@torch.library.custom_op(
    "clearhead::gathered",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? bias, int handle, float scale, Tensor? distance_bias=None,"
        " float cap=0.0) -> (Tensor, Tensor)"
    ),
)
def gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    handle: int,
    scale: float,
    distance_bias: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, T, E) and log-sum-exp (B, H, T), float32 or wider, for the plan with this handle."""
    return _forward(PLANS.by_handle(handle), KernelInputs(q, k, v, bias, scale, distance_bias, cap))


@gathered.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


@torch.library.custom_op(
    "clearhead::gathered_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, int handle, float scale,"
        " bool needs_dbias, Tensor? distance_bias=None, float cap=0.0, bool needs_distance_grad=False)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
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
    needs_dbias: bool,
    distance_bias: Tensor | None = None,
    cap: float = 0.0,
    needs_distance_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and, if needed, of the bias and the bias by distance (else empty tensors)."""
    x = KernelInputs(q, k, v, bias, scale, distance_bias, cap)
    dq, dk, dv, dbias, d_distance = _backward(
        PLANS.by_handle(handle), x, grad, out, lse, needs_dbias, needs_distance_grad
    )
    if dbias is None:
        dbias = q.new_empty(0)
    if d_distance is None:
        d_distance = q.new_empty(0, dtype=lse.dtype)
    return dq, dk, dv, dbias, d_distance


@gathered_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _handle, _scale, needs_dbias, *modification = options
    dbias = bias.new_empty(bias.shape) if bias is not None and needs_dbias else q.new_empty(0)
    size = modification[0].shape if len(modification) > 2 and modification[2] else (0,)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias, q.new_empty(size, dtype=lse.dtype)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    q, k, v, bias, handle, scale, distance_bias, cap = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, bias, out, lse, distance_bias)
    ctx.handle, ctx.scale, ctx.cap = handle, scale, cap
    ctx.set_materialize_grads(False)
    if not torch.compiler.is_compiling():
        ctx.plan = PLANS.by_handle(handle)  # keeps it alive


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    q, k, v, bias, out, lse, distance_bias = ctx.saved_tensors
    n_inputs = len(ctx.needs_input_grad)  # graphs leave out the last arguments if they are the defaults
    if grad is None:
        return (None,) * n_inputs
    needs_dbias = bias is not None and ctx.needs_input_grad[3]
    needs_distance_grad = distance_bias is not None and ctx.needs_input_grad[6]
    dq, dk, dv, dbias, d_distance = gathered_backward(
        grad, q, k, v, bias, out, lse, ctx.handle, ctx.scale, needs_dbias, distance_bias, ctx.cap, needs_distance_grad
    )
    distance_grad = d_distance if needs_distance_grad else None
    return (dq, dk, dv, dbias if needs_dbias else None, None, None, distance_grad, None)[:n_inputs]


gathered.register_autograd(_differentiate, setup_context=_setup)


# -- outside of graphs -------------------------------------------------------------------------------------------------


def attend_by_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    plan: Plan,
    scale: float,
    distance_bias: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Return the output (B, H, T, E) outside of graphs."""
    if torch._C._len_torch_dispatch_stack():  # a mode that records operators must see one
        out: Tensor = gathered(q, k, v, bias, plan.handle, scale, distance_bias, cap)[0]
        return out
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in (q, k, v, bias, distance_bias)]):
        result: Tensor = _PlannedAttention.apply(q, k, v, bias, distance_bias, plan, scale, cap)  # type: ignore[no-untyped-call]
        return result
    return _forward(plan, KernelInputs(q, k, v, bias, scale, distance_bias, cap))[0]


class _PlannedAttention(torch.autograd.Function):
    """The kernels as one node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        distance_bias: Tensor | None,
        plan: Plan,
        scale: float,
        cap: float,
    ) -> Tensor:
        out, lse = _forward(plan, KernelInputs(q, k, v, bias, scale, distance_bias, cap))
        ctx.save_for_backward(q, k, v, bias, distance_bias, out, lse)
        ctx.plan, ctx.scale, ctx.cap = plan, scale, cap
        return out

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, distance_bias, out, lse = ctx.saved_tensors
        x = KernelInputs(q, k, v, bias, ctx.scale, distance_bias, ctx.cap)
        needs_dbias, needs_distance_grad = ctx.needs_input_grad[3:5]
        gradients = _backward(ctx.plan, x, grad, out, lse, needs_dbias, needs_distance_grad)
        return (*gradients, None, None, None)


def _forward(plan: Plan, x: KernelInputs) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp, in the layout that the fake implementation declares."""
    if runs_triton(x.q):
        out, lse = forward_triton(plan, x)
    else:
        with torch.autocast("cpu", enabled=False):  # products stay in the accumulation dtype
            out, lse = _forward_cpu(plan, x)
    return out.contiguous(), lse.contiguous()  # dense kernels return other layouts


def _backward(
    plan: Plan, x: KernelInputs, grad: Tensor, out: Tensor, lse: Tensor, needs_dbias: bool, needs_distance_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k and v and, if needed, of the bias and the bias by distance."""
    grad = unit_stride(grad)
    if runs_triton(x.q):
        dq, dk, dv, d_distance = backward_triton(plan, x, grad, out, lse, needs_distance_grad)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), None, d_distance
    sums = x.q.new_zeros(x.bias_shape, dtype=x.acc_dtype) if x.bias_shape is not None and needs_dbias else None
    d_distance = None
    if x.distance_bias is not None and needs_distance_grad:
        d_distance = x.q.new_zeros(x.distance_bias.shape, dtype=lse.dtype)
    with torch.autocast("cpu", enabled=False):
        dq, dk, dv = _backward_cpu(plan, x, grad, out, lse, sums, d_distance)
    dbias = None if sums is None or x.bias is None else sums.to(x.bias.dtype)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dbias, d_distance


# -- with Triton ------------------------------------------------------------------------------------------------------


def forward_triton(plan: Plan, x: KernelInputs) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row, computed by Triton kernels."""
    tiles = launch.tiles_for(x.q.dtype, max(x.D, x.E), x.modifies_scores)
    dense = _dense_forward(plan, x)
    if dense is not None:
        out, lse = dense[0], dense[1].contiguous()
    else:
        out = x.q.new_empty((*x.q.shape[:-1], x.E))
        lse = x.q.new_empty(x.q.shape[:-1], dtype=torch.float32)
        if not plan.query_pieces:
            return out.zero_(), lse.fill_(-math.inf)
    for index, block_index in enumerate(plan.query_pieces):
        is_first = dense is None and index == 0
        launch.forward(x, block_index, tiles.for_blocks(block_index).forward, out, lse, is_first)
    return out, lse


def backward_triton(
    plan: Plan, x: KernelInputs, grad: Tensor, out: Tensor, lse: Tensor, needs_distance_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and, if needed, of the bias by distance, computed by Triton kernels."""
    dense = _dense_backward(plan, x, grad, out, lse)
    if dense is None:
        # The first piece overwrites every row; without pieces, the gradients are zero.
        allocate, layout = torch.empty_like if plan.query_pieces else torch.zeros_like, torch.contiguous_format
        dq = allocate(x.q, memory_format=layout)
        dk = allocate(x.k, memory_format=layout)
        dv = allocate(x.v, memory_format=layout)
    else:
        dq, dk, dv = dense
    if not plan.query_pieces:
        zeros = None
        if needs_distance_grad and x.distance_bias is not None:
            zeros = torch.zeros_like(x.distance_bias, dtype=lse.dtype)
        return dq, dk, dv, zeros
    tiles = launch.tiles_for(x.q.dtype, max(x.D, x.E), x.modifies_scores)
    state = (grad, *launch.prepare(out, grad, lse, x.bias is not None or x.modifies_scores))
    distances = DistanceSums(x, state) if needs_distance_grad else None
    for index, block_index in enumerate(plan.query_pieces):
        is_first = dense is None and index == 0
        tile = tiles.for_blocks(block_index).query
        launch.query_gradient(x, block_index, tile, state, dq, is_first, distances)
    if distances is not None:
        state = distances.state(state)
        for block_index in plan.query_pieces:
            tile = tiles.for_blocks(block_index).query
            launch.query_gradient(x, block_index, tile, state, dq, False, distances, sum_distances=True)
    for index, block_index in enumerate(plan.key_pieces):
        is_first = dense is None and index == 0
        launch.key_gradient(x, block_index, tiles.for_blocks(block_index).key, state, dk, dv, is_first)
    return dq, dk, dv, None if distances is None else distances.total()


# -- with torch operations --------------------------------------------------------------------------------------------


def _forward_cpu(plan: Plan, x: KernelInputs) -> tuple[Tensor, Tensor]:
    has_dense = plan.has_dense_causal or plan.dense_columns is not None
    dense = _dense_forward(plan, x) if has_dense else None
    if dense is None:
        out = x.q.new_zeros((*x.q.shape[:-1], x.E), dtype=x.acc_dtype)
        lse = x.q.new_full(x.q.shape[:-1], -math.inf, dtype=x.acc_dtype)
    else:
        out, lse = (y.to(x.acc_dtype).contiguous() for y in dense)
    for block_index in plan.query_pieces if x.q.numel() else ():
        cpu.forward(x, block_index, out.flatten(0, 1), lse.flatten(0, 1))
    return out.to(x.q.dtype), lse


def _backward_cpu(
    plan: Plan,
    x: KernelInputs,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    dbias: Tensor | None,
    d_distance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, computed by operations of torch."""
    dense = _dense_backward(plan, x, grad, out, lse)
    if dense is None:
        dq, dk, dv = (y.new_zeros(y.shape, dtype=x.acc_dtype) for y in (x.q, x.k, x.v))
    else:
        dq, dk, dv = (y.to(x.acc_dtype).contiguous() for y in dense)
    delta = (out.to(x.acc_dtype) * grad.to(x.acc_dtype)).sum(-1)
    shift = torch.where(lse == -math.inf, math.inf, lse)
    state = (grad.flatten(0, 1), shift.flatten(0, 1), delta.flatten(0, 1))
    gradients = (dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1))
    is_only_piece = dense is None and len(plan.query_pieces) == 1
    for block_index in plan.query_pieces if x.q.numel() else ():
        cpu.backward(x, block_index, state, gradients, dbias, d_distance, is_only_piece=is_only_piece)
    return dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype)


# -- the dense piece: torch's fused kernels, called directly because they return the log-sum-exp -----------------------


def _dense_forward(plan: Plan, x: KernelInputs) -> tuple[Tensor, Tensor] | None:
    """Return out (B, H, T, E) and log-sum-exp (B, H, T) in float32; None without a dense piece."""
    columns, _ = plan.dense_columns_below(x.S)
    if columns is None and not plan.has_dense_causal:
        return None
    q, (k, v), causal = x.q, _dense_keys(plan, x), plan.has_dense_causal
    if not q.is_cuda:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=x.scale)
        return out, lse
    dense = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=x.scale)
    return dense[0], dense[1].reshape(q.shape[:-1])


def _dense_backward(
    plan: Plan, x: KernelInputs, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of q, k, v for the dense piece, exact because out and lse are those of all pieces merged."""
    columns, _ = plan.dense_columns_below(x.S)
    if columns is None and not plan.has_dense_causal:
        return None
    arguments = (grad, x.q, *_dense_keys(plan, x), out)
    if not x.q.is_cuda:
        dq, *gradients = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *arguments, lse, 0.0, plan.has_dense_causal, scale=x.scale
        )
    else:
        seed = torch.zeros((), dtype=torch.int64, device=x.q.device)
        dq, *gradients = _ATEN._scaled_dot_product_cudnn_attention_backward(
            *arguments, lse.unsqueeze(-1), seed, seed, None, None, None, x.T, arguments[2].shape[2], 0.0,
            plan.has_dense_causal,
            scale=x.scale,
        )  # fmt: skip
    if x.groups > 1:
        gradients = [part.unflatten(1, (-1, x.groups)).sum(2) for part in gradients]
    if columns is not None:
        full = [torch.zeros(y.shape, dtype=dq.dtype, device=dq.device) for y in (x.k, x.v)]
        gradients = [y.index_copy_(2, columns, part) for y, part in zip(full, gradients, strict=True)]
    return dq, gradients[0], gradients[1]


def _dense_keys(plan: Plan, x: KernelInputs) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the dense piece, repeated for each query head."""
    k, v = x.k, x.v
    columns, evenly_spaced = plan.dense_columns_below(x.S)
    if evenly_spaced is not None and k.is_cuda:
        strided = slice(*evenly_spaced)
        k, v = k[:, :, strided], v[:, :, strided]  # views, no copies
    elif columns is not None:
        k, v = k.index_select(2, columns), v.index_select(2, columns)
    return (k, v) if x.groups == 1 else (k.repeat_interleave(x.groups, 1), v.repeat_interleave(x.groups, 1))
