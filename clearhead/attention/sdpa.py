"""The "sdpa" implementation: torch's `scaled_dot_product_attention`, without a (T, S) matrix of scores in memory.

It supports all dot-product scores (`Bilinear` not in half precision) with a softmax. A mask that is exactly `causal()`
becomes the causal flag of the kernel, and a mask that is equal for all queries (`padding`, `every`, `prefix`) becomes a
single row; other masks become (T, S) bool tensors. Backends differ on rows without allowed keys, so such rows attend to
all keys and their outputs are set to zero.

CUDA kernels need a bias in the dtype of the queries. If half precision would round the bias, all inputs are converted
to float32 instead. This is several times slower, but still avoids the (B, H, T, S) scores of the reference and gives a
learned bias its gradient; impl="auto" prefers "sparse" for such inputs, which adds a float32 bias in half precision.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.caches import CACHES
from clearhead._core.tensor_state import has_tangent, is_concrete
from clearhead.attention.inputs import HALF_PRECISION, AttentionInputs, Implementation, mask_to_bhts, to_bhtd
from clearhead.attention.normalizers import Softmax
from clearhead.attention.reference import repeat_kv_heads, scores_overflow
from clearhead.attention.scores import Bilinear, Dot, ScaledDot, SoftCapped
from clearhead.masks import Causal, Mask
from clearhead.ops.sdpa_backends import WithoutCuDNN, is_rare_size

if TYPE_CHECKING:
    from clearhead.attention.sparse.plan import Plan
    from clearhead.attention.sparse.row_intervals import RowIntervals

# Outside of this range a temperature can push float32 scores out of range inside the kernel; the reference handles it.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-3, 1e6
_MAX_ROW_BIAS = 1e4  # the largest bias of a row up to which `subtract_row_max` changes nothing
_DOT_PRODUCTS = (Dot, ScaledDot, Bilinear)  # `as_dot` of these never returns None


class SDPAImplementation(Implementation):
    """Runs torch's `scaled_dot_product_attention`."""

    name = "sdpa"

    def unsupported_reason(self, inputs: AttentionInputs) -> str | None:
        if type(inputs.scores) is SoftCapped:
            return "SoftCapped scores are not a dot product"
        if inputs.q.is_cuda and _only_bias_needs_grad(inputs):
            return "CUDA kernels save nothing for backward if only the bias needs a gradient"
        return kernel_unsupported_reason(inputs)

    def run(self, inputs: AttentionInputs, plan: Plan | RowIntervals | None = None) -> Tensor:
        if inputs.distance_bias is not None:
            inputs = inputs.with_dense_bias()
        assert isinstance(inputs.normalizer, Softmax)  # checked by unsupported_reason
        dot = inputs.scores.as_dot(inputs.q)
        assert dot is not None
        q, scale = dot
        k, v = inputs.k, inputs.v
        enable_gqa = False
        is_upcast = q.dtype in HALF_PRECISION and (needs_fp32_upcast(inputs) or _rounds_gradients(inputs))
        if is_upcast:
            # The only CUDA kernel for float32 with a bias does not support grouped-query attention.
            k, v = (repeat_kv_heads(x, inputs.groups) for x in (k, v))
            q, k, v = (x.to(inputs.acc_dtype) for x in (q, k, v))
        elif q.shape[-3] != k.shape[-3]:  # a branch gives a plain bool, as in `_is_plain_causal`
            enable_gqa = True
        is_causal = isinstance(inputs.mask, Causal) and _is_plain_causal(inputs)
        attn_mask: Tensor | None = None
        has_keys: Tensor | None = None
        if not is_causal and (inputs.mask is not None or inputs.bias is not None):
            attn_mask, has_keys = _mask_and_nonempty_rows(inputs)
        batch_shape = q.shape[:-3]
        if len(batch_shape) != 1:
            q, k, v = to_bhtd(q), to_bhtd(k), to_bhtd(v)
        # Inputs already have the autocast dtype; autocast would also round the bias.
        autocast = nullcontext() if inputs.bias is None else inputs.no_autocast()
        kernels = _kernels_for(q, k, v, is_causal, attn_mask) if q.is_cuda else _ANY_KERNEL
        with autocast, kernels:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if attn_mask is None else mask_to_bhts(attn_mask, batch_shape),
                dropout_p=inputs.normalizer.dropout,
                is_causal=is_causal,
                scale=scale / inputs.normalizer.temperature,
                enable_gqa=enable_gqa,
            )
        out = out.to(inputs.q.dtype) if is_upcast else out
        out = out if len(batch_shape) == 1 else out.reshape(*batch_shape, *out.shape[-3:])
        return out if has_keys is None else out.masked_fill(~has_keys, 0.0)


SDPA = SDPAImplementation()

_ANY_KERNEL: AbstractContextManager[None] = nullcontext()


def _kernels_for(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, attn_mask: Tensor | None
) -> AbstractContextManager[None]:
    """Return a context without cuDNN's attention for sizes that are rare: it prepares a plan for each."""
    if torch.compiler.is_compiling():
        return _ANY_KERNEL
    mask_shape = None if attn_mask is None else attn_mask.shape
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), q.dtype, q.device, is_causal, mask_shape, needs_grad)
    return WithoutCuDNN() if is_rare_size(key) else _ANY_KERNEL


def kernel_unsupported_reason(inputs: AttentionInputs) -> str | None:
    """Return why no kernel of a softmax over dot products, with or without a soft cap, supports a call, or None."""
    normalizer, scores = inputs.normalizer, inputs.scores
    if type(scores) not in _DOT_PRODUCTS and type(scores) is not SoftCapped and scores.as_dot(inputs.q) is None:
        return f"{type(scores).__name__} scores are not a dot product"
    if isinstance(inputs.scores, Bilinear) and inputs.q.dtype in (torch.float16, torch.bfloat16):
        return f"Bilinear scores multiply the queries by W first, and {inputs.q.dtype} would round that product"
    if not isinstance(normalizer, Softmax):
        return f"{type(normalizer).__name__} is not a softmax"
    if not _MIN_TEMPERATURE <= normalizer.temperature <= _MAX_TEMPERATURE:
        return f"temperature {normalizer.temperature:g} is outside of {_MIN_TEMPERATURE:g} to {_MAX_TEMPERATURE:g}"
    score_parameters = inputs.score_parameters if isinstance(inputs.scores, nn.Module) else ()
    if has_tangent(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.distance_bias, *score_parameters):
        return "only the reference has forward-mode derivatives"
    q, k, v = inputs.q, inputs.k, inputs.v
    if 0 in (q.shape[-2], k.shape[-2], q.shape[-1]):
        return "the number of queries, the number of keys or the width is 0"
    if q.is_cuda and 0 in (*q.shape, v.shape[-1]):
        return "CUDA kernels compute no gradients if the batch or the width of the values is 0"
    if q.device.type != "cpu":
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if scores_overflow(inputs, inputs.acc_dtype, normalizer.temperature, recomputed=True):
            return "queries times keys are so large that the backward pass of the kernel could compute other scores"
    elif scores_overflow(inputs, torch.float32, normalizer.temperature):
        return "queries times keys exceed the range of float32"
    return None


def needs_fp32_upcast(inputs: AttentionInputs) -> bool:
    """Return whether a CUDA kernel must run in float32 because half precision would round the bias."""
    if not inputs.q.is_cuda or inputs.q.dtype == inputs.acc_dtype or not inputs.biases:
        return False
    is_unscaled = isinstance(inputs.normalizer, Softmax) and inputs.normalizer.temperature == 1.0
    dtypes = [torch.promote_types(bias.dtype, inputs.q.dtype) for bias in inputs.biases]
    return not is_unscaled or any([dtype != inputs.q.dtype for dtype in dtypes])


def _rounds_gradients(inputs: AttentionInputs) -> bool:
    """Return whether the CPU kernel must run in float32 for exact gradients.

    Its backward pass computes row sums from the output, which half precision has rounded. The scores' gradients are the
    difference from these sums, and a temperature below 1 multiplies their error.
    """
    if inputs.q.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    assert isinstance(inputs.normalizer, Softmax)
    return inputs.normalizer.temperature < 1.0 and any([x.requires_grad for x in (inputs.q, inputs.k, inputs.v)])


def _only_bias_needs_grad(inputs: AttentionInputs) -> bool:
    """Return whether the bias is the only input that needs a gradient."""
    if not torch.is_grad_enabled() or not any([bias.requires_grad for bias in inputs.biases]):
        return False
    return not any([x.requires_grad for x in (inputs.q, inputs.k, inputs.v, *inputs.score_parameters)])


def _is_plain_causal(inputs: AttentionInputs) -> bool:
    """Return whether the causal flag of the kernel expresses a causal mask."""
    if inputs.bias is not None:
        return False
    # Sizes are symbolic under torch.compile, and only a branch turns their comparison into a plain bool.
    if inputs.query_offset == 0 and inputs.q.shape[-2] == inputs.k.shape[-2]:  # noqa: SIM103
        return True
    return False


def _mask_and_nonempty_rows(inputs: AttentionInputs) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask for the kernel, and which queries may attend to any key (None: all)."""
    if inputs.mask is None or _newest_query_attends_to_all(inputs):
        return _as_attn_mask(inputs, None), None
    if not is_concrete(inputs.q) or inputs.mask.depends_on_query or inputs.bias is not None:
        return _build_mask(inputs, inputs.mask)
    versions = inputs.mask.versions
    if versions is None:
        return _build_mask(inputs, inputs.mask)
    # All layers of a model use the same row. It is cached while its mask exists and the mask's tensors are unchanged.
    key = (inputs.S, inputs.q.device, inputs.q.dtype, versions, torch.is_inference_mode_enabled())
    entry = _ROW_CACHE.get(inputs.mask)
    if entry is None or entry[0] != key:
        entry = _ROW_CACHE[inputs.mask] = (key, _build_mask(inputs, inputs.mask))
    return entry[1]


_ROW_CACHE: WeakKeyDictionary[Mask, tuple[object, tuple[Tensor | None, Tensor | None]]] = WeakKeyDictionary()
CACHES.register(_ROW_CACHE.clear)


def _build_mask(inputs: AttentionInputs, mask: Mask) -> tuple[Tensor | None, Tensor | None]:
    """Build the results of `_mask_and_nonempty_rows`."""
    allowed = inputs.allowed()
    assert allowed is not None
    if not mask.may_be_empty(inputs.T, inputs.S, query_offset=inputs.query_offset):
        return _as_attn_mask(inputs, allowed), None
    has_keys = allowed.any(-1, keepdim=True)  # (…, T or 1, 1)
    # Only on a CPU: on a GPU reading the result would synchronize.
    if is_concrete(has_keys) and has_keys.device.type == "cpu" and bool(has_keys.all()):
        return _as_attn_mask(inputs, allowed), None
    return _as_attn_mask(inputs, allowed | ~has_keys), has_keys


def _newest_query_attends_to_all(inputs: AttentionInputs) -> bool:
    """Return whether this is a decode step under `causal()`, in which nothing is masked."""
    return isinstance(inputs.mask, Causal) and inputs.T == 1 and inputs.query_offset >= inputs.S - 1


def _as_attn_mask(inputs: AttentionInputs, allowed: Tensor | None) -> Tensor | None:
    """Combine mask and bias into the `attn_mask` argument of the kernel."""
    if inputs.bias is None:
        if allowed is None or not inputs.q.is_cuda or inputs.q.dtype == inputs.acc_dtype:
            return allowed
        # cuDNN masks by −65,504 if the mask is bool, and scores can be smaller than that.
        return torch.zeros_like(allowed, dtype=inputs.q.dtype).masked_fill_(~allowed, -math.inf)
    # A temperature divides scores and bias. CPU kernels accept a float32 bias for half-precision queries, CUDA kernels
    # need the dtype of the queries.
    dtype = inputs.q.dtype if inputs.q.is_cuda and not needs_fp32_upcast(inputs) else inputs.acc_dtype
    bias = inputs.scaled_bias().to(dtype)
    if inputs.q.is_cuda and (bias.stride()[-1:], bias.shape[-1:]) != ((1,), (inputs.S,)):  # CUDA needs dense rows
        bias = bias.expand(*bias.shape[:-1], inputs.S).contiguous()
    bias = bias if allowed is None else bias.masked_fill(~allowed, -math.inf)
    return subtract_row_max(bias) if inputs.q.is_cuda and torch.is_grad_enabled() else bias


def subtract_row_max(bias: Tensor) -> Tensor:
    """Subtract the largest bias of a row from the row if it is large, which does not change the weights.

    The backward pass of CUDA kernels computes exp(score − log-sum-exp). If both are 1e30, their rounding errors differ
    by more than the range of the exponential.
    """
    row_max = bias.detach().amax(-1, keepdim=True)
    return bias - torch.where((row_max.abs() > _MAX_ROW_BIAS) & row_max.isfinite(), row_max, 0.0).to(bias.dtype)
