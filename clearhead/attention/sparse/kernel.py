"""The sparse implementation of `attend`: each block of queries is computed with the keys it may see only.

The work follows the plan of the mask (`attention.sparse.plan`), for any mask: keys that every query sees are computed
by a dense kernel, all others by a kernel that gathers columns. That is a Triton kernel on a GPU and torch operations on
a CPU. A learned bias gets its gradient from the torch operations; the Triton kernels compute none, so that SDPA handles
such calls."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead._core.tensor_state import HAS_TRITON, is_concrete, runs_triton
from clearhead.attention import sdpa
from clearhead.attention.inputs import AttentionInputs, Implementation, mask_to_bhts, to_bhtd
from clearhead.attention.normalizers import Softmax
from clearhead.attention.sparse.cost_model import WORTH_PLANNING, Rates, rates_for
from clearhead.attention.sparse.plan import Blocking, Plan, plan
from clearhead.masks import Causal, Mask, allow, as_mask, leaves

_MAX_WIDTH = 256


class SparseImplementation(Implementation):
    """Compute only the pairs in the plan of the mask."""

    name = "sparse"

    def unsupported_reason(self, inputs: AttentionInputs) -> str | None:
        if inputs.mask is None and not sdpa.needs_fp32_upcast(inputs):
            return "there is no mask, so nothing to skip"
        reason = sdpa.SDPA.unsupported_reason(inputs)
        if reason is not None:
            return reason
        assert isinstance(inputs.normalizer, Softmax)
        if inputs.normalizer.dropout:
            return "dropout of attention weights is not supported"
        if not torch.compiler.is_compiling() and not _is_concrete_call(inputs):
            return "torch.func transforms and FakeTensorMode are not supported"
        if _is_exporting():
            return "a plan exists in this process only, and exported programs run in others"
        if torch.compiler.is_compiling():
            from clearhead.attention.sparse.compile import plan_key

            if plan_key(inputs) is None:
                return "torch.compile needs static shapes and a mask without tensors"
        if inputs.q.is_cuda:
            return _triton_unsupported_reason(inputs)
        if inputs.q.device.type != "cpu":
            return f"there is no sparse kernel for {inputs.q.device.type}"
        return None

    def run(self, inputs: AttentionInputs) -> Tensor:
        from clearhead.attention.sparse.op import gathered

        assert isinstance(inputs.normalizer, Softmax)
        dot = inputs.scores.as_dot(inputs.q)
        assert dot is not None
        q, scale = dot
        lead = q.shape[:-3]
        mask = as_mask(inputs.mask)
        mask = mask if len(lead) == 1 or not mask.batch_shape else _fold_batch(mask, inputs, lead)
        if torch.compiler.is_compiling():
            from clearhead.attention.sparse.compile import constant_handle, plan_key

            key = plan_key(inputs)
            assert key is not None  # checked by unsupported_reason
            handle = constant_handle(key)
        else:
            # Referenced until the operator has run, because the registry does not keep the plan alive.
            sparse_plan = plan(
                mask,
                inputs.T,
                inputs.S,
                query_offset=inputs.query_offset,
                device=q.device,
                blocking=blocking_for(inputs),
            )
            handle = sparse_plan.handle
        bias = None if inputs.bias is None else inputs.scaled_bias()
        if bias is not None and len(lead) != 1 and bias.requires_grad:
            bias = bias.to(inputs.acc_dtype)  # before it is expanded, so that its gradient is summed in this dtype
        bias = None if bias is None else mask_to_bhts(bias, lead)
        k, v = inputs.k, inputs.v
        if not runs_triton(q):
            # Half precision would round the output from which the backward pass computes its row sums, and a low
            # temperature magnifies that error. The kernel for CPUs converts its inputs to this dtype anyway.
            q, k, v = (x.to(inputs.acc_dtype) for x in (q, k, v))
        out, _ = gathered(to_bhtd(q), to_bhtd(k), to_bhtd(v), bias, handle, scale / inputs.normalizer.temperature)
        out = out.to(inputs.q.dtype)
        return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])

    def is_preferred(self, inputs: AttentionInputs) -> bool:
        """Return whether the kernel supports this call, and its plan is predicted to be faster than SDPA."""
        if inputs.T * inputs.S < WORTH_PLANNING:
            return False
        if (inputs.mask is None or isinstance(inputs.mask, Causal)) and not sdpa.needs_fp32_upcast(inputs):
            return False  # SDPA skips the hidden half itself
        is_plain_softmax = isinstance(inputs.normalizer, Softmax) and not inputs.normalizer.dropout
        if not is_plain_softmax or inputs.q.device.type not in ("cpu", "cuda"):
            return False  # unsupported, so a plan would be useless
        if _is_exporting() or (not torch.compiler.is_compiling() and not _is_concrete_call(inputs)):
            return False
        # Last, because it can read the mask's data.
        return is_predicted_faster(inputs) and self.unsupported_reason(inputs) is None


SPARSE = SparseImplementation()


def _triton_unsupported_reason(inputs: AttentionInputs) -> str | None:
    """Return why the Triton kernels do not support a call, or None."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if inputs.bias is not None and inputs.bias.requires_grad:
        return "the bias needs a gradient, which the Triton kernels do not compute"
    if inputs.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the Triton kernels support float16, bfloat16 and float32, not {inputs.q.dtype}"
    width = max(inputs.q.shape[-1], inputs.v.shape[-1])
    return f"the Triton kernels support heads up to {_MAX_WIDTH} wide, not {width}" if width > _MAX_WIDTH else None


def _is_exporting() -> bool:
    """Return whether torch.export is tracing. In torch 2.11, `torch.compiler.is_exporting()` is True in every graph."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _is_concrete_call(inputs: AttentionInputs) -> bool:
    """Return whether all tensors of the call have data, and no torch.func transform is active."""
    bias = [] if inputs.bias is None else [inputs.bias]
    mask_data = [x for leaf, _ in leaves(as_mask(inputs.mask)) for x in getattr(leaf, "data", ())]
    return all([is_concrete(x) for x in (inputs.q, inputs.k, inputs.v, *bias, *inputs.score_parameters, *mask_data)])


def is_predicted_faster(inputs: AttentionInputs) -> bool:
    """Return whether the plan of a call is predicted to be faster than SDPA."""
    heads = 1
    for n in inputs.q.shape[:-2]:
        heads = heads * n
    width = max(inputs.q.shape[-1], inputs.v.shape[-1])
    backward = torch.is_grad_enabled() and any([x.requires_grad for x in (inputs.q, inputs.k, inputs.v)])
    sdpa_dtype = inputs.acc_dtype if sdpa.needs_fp32_upcast(inputs) else inputs.q.dtype
    if not torch.compiler.is_compiling():
        # Plans of tensors without a modification count cannot be cached: every call would build one.
        if as_mask(inputs.mask).versions is None:
            return False
        sparse_rates, sdpa_rates = (rates_for(inputs.q.device, dtype) for dtype in (inputs.q.dtype, sdpa_dtype))
        return beats_sdpa(plan_for(inputs), heads, width, backward, sparse_rates, sdpa_rates=sdpa_rates)
    # Not imported above, because its decorators import torch's compiler.
    from clearhead.attention.sparse.compile import constant_beats_sdpa, is_static, plan_key

    key = plan_key(inputs)
    if key is None or not is_static(heads) or not is_static(width):
        return False
    return constant_beats_sdpa(key, (inputs.q.dtype, sdpa_dtype), (heads, width, backward))


def beats_sdpa(
    sparse_plan: Plan,
    heads: int,
    width: int,
    backward: bool,
    rates: Rates,
    device: torch.device | None = None,
    *,
    sdpa_rates: Rates | None = None,
) -> bool:
    """Return whether a plan is predicted to be faster than SDPA.

    Args:
        sparse_plan: The plan.
        heads: Batch size times number of heads.
        width: Width of a head.
        backward: Whether gradients are computed too.
        rates: Rates of the device.
        device: Device of the call, if it differs from the plan's.
        sdpa_rates: Rates for SDPA if they differ, as for another dtype.

    Returns:
        True if the plan is predicted to be faster."""
    sparse_ms = sparse_plan.predicted_ms(heads=heads, width=width, rates=rates, backward=backward)
    sdpa_rates = rates if sdpa_rates is None else sdpa_rates
    return sparse_ms < sdpa_rates.milliseconds(**sparse_plan.fused_work(heads, device), width=width, backward=backward)


def plan_for(inputs: AttentionInputs) -> Plan:
    """Return the plan that `run` follows."""
    return plan(
        inputs.mask,
        inputs.T,
        inputs.S,
        query_offset=inputs.query_offset,
        device=inputs.q.device,
        blocking=blocking_for(inputs),
    )


def blocking_for(inputs: AttentionInputs) -> Blocking:
    """Return the blocking for a call: the tile sizes of its kernels, and dense calls if there is a dense kernel."""
    return blocking_on(
        inputs.q.device, inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1], dense=inputs.bias is None
    )


def blocking_on(device: torch.device, dtype: torch.dtype, D: int, E: int, *, dense: bool = True) -> Blocking:
    """Return the blocking for queries of width D and values of width E on any device, available or not."""
    dense = dense and _has_dense_kernel(device, dtype, D, E)
    if device.type != "cuda":
        return Blocking(64, 64, 128 if dense else None, dense)
    from clearhead.attention.sparse.launch import tiles_for

    tiles = tiles_for(dtype, max(D, E))
    long_rows = None if tiles.long is None else tiles.long.forward.M
    return Blocking(tiles.forward.M, tiles.key.M, 1024 if dense else None, dense, long_rows)


def _has_dense_kernel(device: torch.device, dtype: torch.dtype, D: int, E: int) -> bool:
    """Return whether torch has a kernel that returns its log-sum-exp, for queries of width D and values of width E."""
    if device.type != "cuda":
        return device.type == "cpu" and D == E
    if torch.are_deterministic_algorithms_enabled():
        return False  # its backward sums in a varying order
    return dtype in (torch.float16, torch.bfloat16) and D % 8 == 0 and E % 8 == 0 and max(D, E) <= 128


def _fold_batch(mask: Mask, inputs: AttentionInputs, lead: torch.Size) -> Mask:
    """Return the mask with its batch dimensions folded into one, like the tensors."""
    return allow(
        mask_to_bhts(mask.dense(inputs.T, inputs.S, query_offset=inputs.query_offset, device=inputs.q.device), lead)
    )
