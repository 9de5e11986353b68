"""The gathered way: each block of queries is computed with the keys it may see, and with no others.

The work follows the plan of the mask (`attention.plan`), for any mask at all: keys that every query sees go through a dense
kernel, the rest through a kernel that gathers columns. On a GPU that is Triton, on the CPU torch operations.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from clearhead.attention.kernels import gathered_dense
from clearhead.attention.kernels.call import Call
from clearhead.attention.kernels.fused import why_not as why_not_fused
from clearhead.attention.plan import Blocking, Plan, plan
from clearhead.attention.planning.cost import rates_of
from clearhead.attention.weights import Softmax
from clearhead.masks import Causal, Mask

_WIDEST = 256
_SMALLEST = 1 << 20
"""Below this many pairs (T × S) planning costs more than it can save, and "auto" does not try."""


def why_not(call: Call) -> str | None:
    """Why the gathered way cannot run this call, or None if it can."""
    if call.mask is None:
        return "there is no mask, so nothing to skip"
    reason = why_not_fused(call)
    if reason is not None:
        return reason
    assert isinstance(call.weights, Softmax)
    if call.weights.dropout:
        return "dropout of weights is not gathered"
    if call.bias is not None and call.bias.requires_grad:
        return "the bias needs a gradient"
    if call.q.is_cuda:
        return _why_not_triton(call)
    if call.q.device.type != "cpu":
        return f"there is no gathered kernel for {call.q.device.type}"
    return None


def _why_not_triton(call: Call) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if call.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel is for float16, bfloat16 and float32, not {call.q.dtype}"
    widest = max(call.q.shape[-1], call.v.shape[-1])
    return f"heads are {widest} wide; the kernel takes up to {_WIDEST}" if widest > _WIDEST else None


def run(call: Call) -> Tensor:
    from clearhead.attention.kernels.gathered_ops import constant_handle, gathered

    assert isinstance(call.weights, Softmax)
    assert call.mask is not None
    dot = call.scores.as_dot(call.q)
    assert dot is not None
    q, scale = dot
    lead = q.shape[:-3]
    mask = call.mask if len(lead) == 1 or not call.mask.batch_shape else _folded(call.mask, call, lead)
    if torch.compiler.is_compiling():
        handle = constant_handle(mask, call.T, call.S, call.offset, q.device, blocking_for(call))
    else:
        made = plan(mask, call.T, call.S, offset=call.offset, device=q.device, blocking=blocking_for(call))
        handle = made.handle
    four = [x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:]) for x in (q, call.k, call.v)]
    bias = None if call.bias is None else _four_bias(call, lead)
    out, _ = gathered(*four, bias, handle, scale / call.weights.temperature)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])


def worth(call: Call) -> bool:
    """Whether the plan predicts that gathering is faster than the fused kernel. Not asked while a graph is compiled."""
    if torch.compiler.is_compiling():
        return False
    if call.mask is None or call.T * call.S < _SMALLEST or isinstance(call.mask, Causal):
        return False
    made = plan_for(call)
    heads = 1
    for n in call.q.shape[:-2]:
        heads *= n
    width = max(call.q.shape[-1], call.v.shape[-1])
    backward = call.q.requires_grad or call.k.requires_grad or call.v.requires_grad
    ours = made.predicted_ms(heads=heads, width=width, backward=backward)
    pairs = float(heads) * call.T * call.S
    plain = call.mask.depends_on_query
    fused = rates_of(call.q.device).milliseconds(
        dense=0.0 if plain else pairs, masked=pairs if plain else 0.0, width=width, backward=backward
    )
    return ours < fused


def plan_for(call: Call) -> Plan:
    """The plan that `run` would follow."""
    assert call.mask is not None
    return plan(
        call.mask, call.T, call.S, offset=call.offset, device=call.q.device, blocking=blocking_for(call)
    )


def blocking_for(call: Call) -> Blocking:
    """Rows of a block as the kernels want them, and dense calls only where there is a dense kernel."""
    dense = gathered_dense.can_run(call.q, call.v) and call.bias is None
    if not call.q.is_cuda:
        return Blocking(64, 64, 128 if dense else None, dense)
    from clearhead.attention.kernels.gathered_launch import tiles_for

    tiles = tiles_for(call.q.dtype, max(call.q.shape[-1], call.v.shape[-1]))
    return Blocking(tiles.forward.M, tiles.key.M, 1024 if dense else None, dense)


def _folded(mask: Mask, call: Call, lead: torch.Size) -> Mask:
    """A mask with several batch dimensions as one with a single one, as the tensors are folded."""
    from clearhead.masks import allow

    dense = mask.dense(call.T, call.S, offset=call.offset, device=call.q.device)
    return allow(
        dense.expand(*lead, dense.shape[-3] if dense.dim() > 2 else 1, call.T, call.S).flatten(0, -4)
    )


def _four_bias(call: Call, lead: torch.Size) -> Tensor:
    assert call.bias is not None
    bias = call.bias
    while bias.dim() < 4:
        bias = bias.unsqueeze(0)
    if len(lead) == 1:
        return bias
    return bias.expand(*lead, *bias.shape[-3:]).reshape(-1, *bias.shape[-3:])
