"""Emulate the kernel choice of a device while a module runs on fake tensors.

To torch, fake tensors look like CPU tensors. The choices of a GPU that differ are made here: fused attention (by dtype
and mask, as torch chooses), dropout and RMS norm. A call of `attend` with a sparse mask follows its plan if the plan is
predicted to be faster, as it would with real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from clearhead._core.call_types import Args, Kwargs, TorchFunction
from clearhead._core.torch_compat import patched_functions
from clearhead.attention.attend import choose, validate_inputs
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.normalizers import Softmax
from clearhead.attention.observe import OBSERVERS, AttentionObserver, ObservedCall, Proceed, observing
from clearhead.attention.sparse.cost_model import rates_for
from clearhead.attention.sparse.kernel import beats_sdpa, blocking_on, may_be_faster
from clearhead.attention.sparse.op import gathered
from clearhead.attention.sparse.plan import Plan, plan
from clearhead.masks import Causal, Mask

PAIR_SYMBOLS = {10_007: "P", 10_009: "P_g"}
"""Symbols of the allowed and the computed pairs, by the prime that replaces their count if they have no formula."""


@dataclass(frozen=True)
class AttentionRecord:
    """One attention call: its sizes, mask and plan. Pairs are those of one head, summed over the batch."""

    path: str
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    itemsize: int
    mask: Mask | None = None
    is_causal: bool = False
    allowed: int | None = None
    computed: int | None = None
    plan: Plan | None = None  # set if the call runs by its plan

    @property
    def dense(self) -> int:
        """Query-key pairs without a mask."""
        return self.batch * self.queries * self.keys

    @property
    def mask_repeats(self) -> int:
        """Sequences that share the mask's own pairs: the batch, unless the mask has a batch dimension."""
        return 1 if self.mask is None or math.prod(self.mask.batch_shape) > 1 else self.batch


def device_plan(device: str, mask: Mask, record: AttentionRecord, dtype: torch.dtype) -> Plan:
    """Return the plan of a mask for a call of these sizes, in the blocks of the device's kernels."""
    with _disable_current_modes():
        blocking = blocking_on(torch.device(device), dtype, record.width, record.width)
        return plan(mask, record.queries, record.keys, query_offset=_query_offset(mask, record), blocking=blocking)


def _query_offset(mask: Mask, record: AttentionRecord) -> int | None:
    """Return the position of the first query; queries are aligned with the end of the keys."""
    if record.queries == record.keys or not mask.uses_query_position:
        return None
    return max(record.keys - record.queries, 0)


class DeviceDispatch(TorchFunctionMode, AttentionObserver):
    """Replaces torch functions and `attend` by the operators that the device would run.

    Args:
        device: "cuda" or "cpu".
        path: Returns the path of the module that runs.
        plans: Filled with the pairs per head that each plan computes, by plan handle.
        reference: Records of the execution whose formulas are recovered; its plans are reused.
    """

    def __init__(
        self,
        device: str,
        path: Callable[[], str],
        plans: dict[int, int],
        reference: list[AttentionRecord] | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self.path = path
        self.plans = plans
        self.reference = reference
        self.records: list[AttentionRecord] = []

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if OBSERVERS.get() and args[0].dim() == 4:  # there are no observers inside `attend`
                is_causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
                key = args[1] if len(args) > 1 else kwargs["key"]
                self.records.append(self._record(args[0], key, None, is_causal))
            if self.device == "cuda":
                return _gpu_attention(*args, **kwargs)
        elif func is torch.rand and args and args[0] in ([], ()):
            return 1.0  # a scalar draw decides whether some models skip a layer: skip none
        elif self.device == "cuda" and func in _GPU_FUNCTIONS:
            return _GPU_FUNCTIONS[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _record(self, q: Tensor, k: Tensor, mask: Mask | None, is_causal: bool) -> AttentionRecord:
        return AttentionRecord(
            path=self.path(),
            batch=math.prod(q.shape[:-3]),
            heads=q.shape[-3],
            key_heads=k.shape[-3],
            queries=q.shape[-2],
            keys=k.shape[-2],
            width=q.shape[-1],
            itemsize=q.element_size(),
            mask=mask,
            is_causal=is_causal,
        )

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe `attend`, and replace data-dependent functions of other libraries."""
        with observing(self), patched_functions(_PATCHES):
            yield

    def on_attend(self, call: ObservedCall, proceed: Proceed) -> Tensor:
        """Run the operators of the device for a call, in place of the call."""
        inputs = validate_inputs(
            call.q,
            call.k,
            call.v,
            call.mask,
            scores=call.scores,
            normalizer=call.normalizer,
            bias=call.bias,
            query_offset=call.query_offset,
        )
        inputs = replace(inputs, reads_bias=False)
        q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
        record = self._record(q, k, mask, isinstance(mask, Causal) and inputs.T == inputs.S)
        if mask is not None and not record.is_causal:
            record = self._with_pairs(record, mask, inputs, call.impl)
        self.records.append(record)
        dot = None if record.plan is None else inputs.scores.as_dot(q)
        if record.plan is not None and dot is not None:
            assert isinstance(inputs.normalizer, Softmax)
            self.plans[record.plan.handle] = record.computed or 0
            bhtd = [x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:]) for x in (dot[0], k, v)]
            out = gathered(*bhtd, inputs.bias, record.plan.handle, dot[1] / inputs.normalizer.temperature)[0]
            return out.reshape(*q.shape[:-1], v.shape[-1])
        return choose(inputs, call.impl).run(inputs)

    def _with_pairs(self, record: AttentionRecord, mask: Mask, inputs: AttentionInputs, impl: str) -> AttentionRecord:
        """Add plan and pair counts to a record; if formulas are recovered, primes replace the counts."""
        if self.reference is not None:
            call_plan = next(x for x in self.reference if x.path == record.path).plan
            allowed, computed = (record.mask_repeats * prime for prime in PAIR_SYMBOLS)
        else:
            call_plan = self._plan(record, mask, inputs, impl)
            with _disable_current_modes():
                pairs = mask.count(record.queries, record.keys, query_offset=_query_offset(mask, record))
                allowed = record.mask_repeats * pairs
                computed = 0 if call_plan is None else record.mask_repeats * call_plan.computed_pairs
        return replace(record, allowed=allowed, computed=None if call_plan is None else computed, plan=call_plan)

    def _plan(self, record: AttentionRecord, mask: Mask, inputs: AttentionInputs, impl: str) -> Plan | None:
        """Return the plan if `impl` asks for it, or if `attend` would choose it on the device."""
        if impl in ("reference", "sdpa") or not isinstance(inputs.normalizer, Softmax) or inputs.normalizer.dropout:
            return None
        if impl == "auto" and not may_be_faster(inputs):
            return None
        mask_plan = device_plan(self.device, mask, record, inputs.q.dtype)
        with _disable_current_modes():
            rates = rates_for(torch.device(self.device), inputs.q.dtype)
            backward = torch.is_grad_enabled() and inputs.q.requires_grad
            heads = record.batch * record.heads
            is_faster = impl == "sparse" or beats_sdpa(mask_plan, heads, record.width, backward, rates)
        return mask_plan if is_faster else None


# ---------------------------------------------------------------------- GPU kernels


def _gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that torch chooses on a GPU.

    Flash attention runs in half precision without a mask, and the memory-efficient kernel with a mask or in float32.
    The math implementation runs in float64, and for grouped-query attention outside flash attention."""
    q, k, v = query, key, value
    ops = torch.ops.aten
    if q.dim() == 4 and q.element_size() == 2 and attn_mask is None and q.shape[-1] == v.shape[-1] <= 256:
        return ops._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if q.dim() != 4 or q.shape[1] != k.shape[1] or q.element_size() == 8:
        math_attention = ops._scaled_dot_product_attention_math
        return math_attention(q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    efficient_attention = ops._scaled_dot_product_efficient_attention
    return efficient_attention(q, k, v, attn_mask, needs_grad, dropout_p, is_causal, scale=scale)[0]


def _gpu_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and 0.0 < p < 1.0 else x


def _gpu_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Run a layer-norm kernel, which accesses the same bytes and saves one more value per row."""
    return torch.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]


_GPU_FUNCTIONS: dict[object, Callable[..., Tensor]] = {
    F.dropout: _gpu_dropout,
    torch.dropout: _gpu_dropout,
    F.rms_norm: _gpu_rms_norm,
    torch.rms_norm: _gpu_rms_norm,
}

_PATCHES: tuple[tuple[str, str, Callable[..., object]], ...] = (
    ("transformers.masking_utils", "find_packed_sequence_indices", lambda *_, **__: None),
    ("torch.nn.modules.transformer", "_detect_is_causal_mask", lambda mask, *_, **__: mask is not None),
)
"""Data-dependent functions of other libraries, with their result for one ordinary sequence: no packing, causal."""
