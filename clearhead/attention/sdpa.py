"""torch's `scaled_dot_product_attention`: one kernel, no (T, S) matrix of scores in memory.

Runs every dot-product score with a softmax (`Bilinear` not in half precision). A mask that is only `causal()` becomes
the kernel's own causal flag, one that is the same for every query (`padding`, `every`, `prefix`) a single row; other
masks are built once as (T, S) bools. Queries that may attend to nothing are given everything and their output is then
zeroed: back ends differ on such rows.

CUDA's kernels take a bias in the queries' dtype only. One that half precision would round is not rounded: the kernel is
then given everything in float32. That is several times slower, still without the (B, H, T, S) scores of the reference,
and gives a learned bias its gradient; "auto" gathers such calls where it can, in half precision with a float32 bias."""

from __future__ import annotations

import math
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.tensor_state import has_tangent, is_concrete
from clearhead.attention.inputs import AttentionInputs, Implementation, mask_to_bhts, to_bhtd
from clearhead.attention.normalizers import Softmax
from clearhead.attention.reference import repeat_kv_heads, scores_overflow
from clearhead.attention.scores import Bilinear, Dot, ScaledDot
from clearhead.masks import Causal, Mask

# Outside of these a temperature can push float32 scores over the edge inside the kernel; the reference takes them.
_COOLEST, _HOTTEST = 1e-3, 1e6
_LARGE = 1e4  # of a bias; up to here nothing is taken off, and nothing rounded
_DOTS = (Dot, ScaledDot, Bilinear)  # known to be dot products; others are asked


class SDPAImplementation(Implementation):
    """torch's `scaled_dot_product_attention`."""

    name = "sdpa"

    def unsupported_reason(self, call: AttentionInputs) -> str | None:
        normalizer = call.normalizer
        if type(call.scores) not in _DOTS and call.scores.as_dot(call.q) is None:
            return f"{type(call.scores).__name__} scores are not a dot product"
        if isinstance(call.scores, Bilinear) and call.q.dtype in (torch.float16, torch.bfloat16):
            return f"Bilinear scores multiply the queries by W first, and {call.q.dtype} would round that product"
        if not isinstance(normalizer, Softmax):
            return f"{type(normalizer).__name__} is not a softmax"
        if not _COOLEST <= normalizer.temperature <= _HOTTEST:
            return f"temperature {normalizer.temperature:g} is outside of {_COOLEST:g} to {_HOTTEST:g}"
        if has_tangent(call.q, call.k, call.v, call.bias, *call.score_parameters):
            return "derivatives in forward mode are taken of the reference alone"
        if call.q.is_cuda and _bias_alone_learns(call):
            return "CUDA's kernels keep nothing for the backward pass where nothing but the bias learns"
        if 0 in (call.T, call.S, call.q.shape[-1]):
            return "there is nothing to attend to, or no width to compare by"
        if call.q.is_cuda and 0 in (*call.q.shape, call.v.shape[-1]):
            return "CUDA's kernels pass no gradient through an empty batch, or values without a width"
        if call.q.device.type != "cpu":
            return None
        if torch.is_grad_enabled() and any([x.requires_grad for x in (call.q, call.k, call.v)]):
            if scores_overflow(call, call.acc_dtype, normalizer.temperature, again=True):
                return "queries times keys are so large that the kernel's backward pass could find other scores"
        elif scores_overflow(call, torch.float32, normalizer.temperature):
            return "queries times keys are beyond the range of float32"
        return None

    def run(self, call: AttentionInputs) -> Tensor:
        assert isinstance(call.normalizer, Softmax)  # unsupported_reason has said so
        dot = call.scores.as_dot(call.q)
        assert dot is not None
        q, scale = dot
        k, v, grouped, widened = call.k, call.v, False, needs_fp32_upcast(call)
        if widened:
            # The one CUDA kernel for float32 with a bias does not share keys among heads.
            q, k, v = (x.to(call.acc_dtype) for x in (q, *(repeat_kv_heads(x, call.groups) for x in (k, v))))
        elif call.groups != 1:  # a plain bool, as in `_is_plain_causal`
            grouped = True
        is_causal = _is_plain_causal(call)
        attn_mask, seen = (None, None) if is_causal else _mask_and_seen(call)
        lead = q.shape[:-3]
        # Autocast would round the bias with the rest, which is in its dtype already.
        with nullcontext() if call.bias is None else call.no_autocast():
            out = F.scaled_dot_product_attention(
                to_bhtd(q),
                to_bhtd(k),
                to_bhtd(v),
                attn_mask=None if attn_mask is None else mask_to_bhts(attn_mask, lead),
                dropout_p=call.normalizer.dropout,
                is_causal=is_causal,
                scale=scale / call.normalizer.temperature,
                enable_gqa=grouped,
            )
        out = out.to(call.q.dtype) if widened else out
        out = out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])
        return out if seen is None else out.masked_fill(~seen, 0.0)


SDPA = SDPAImplementation()


def needs_fp32_upcast(call: AttentionInputs) -> bool:
    """Whether the kernel is given queries, keys and values in float32, for a bias that half precision would round."""
    if call.bias is None or not call.q.is_cuda or call.q.dtype == call.acc_dtype:
        return False
    as_given = isinstance(call.normalizer, Softmax) and call.normalizer.temperature == 1.0
    return not as_given or torch.promote_types(call.bias.dtype, call.q.dtype) != call.q.dtype


def _bias_alone_learns(call: AttentionInputs) -> bool:
    if call.bias is None or not call.bias.requires_grad or not torch.is_grad_enabled():
        return False
    return not any([x.requires_grad for x in (call.q, call.k, call.v, *call.score_parameters)])


def _is_plain_causal(call: AttentionInputs) -> bool:
    if not isinstance(call.mask, Causal) or call.bias is not None:
        return False
    # Sizes are symbols under torch.compile, and only a branch makes a plain bool of a comparison between them.
    if call.query_offset == 0 and call.T == call.S:  # noqa: SIM103
        return True
    return False


def _mask_and_seen(call: AttentionInputs) -> tuple[Tensor | None, Tensor | None]:
    """What the kernel gets as its mask, and which queries see anything (None: all of them)."""
    if call.mask is None or _sees_everything(call):
        return _as_bias(call, None), None
    if not is_concrete(call.q) or call.mask.depends_on_query or call.bias is not None:
        return _build(call, call.mask)
    versions = call.mask.versions
    if versions is None:
        return _build(call, call.mask)
    # One row serves every layer of a model: it is kept as long as its mask lives and its tensors are unchanged.
    key = (call.S, call.q.device, call.q.dtype, versions, torch.is_inference_mode_enabled())
    kept = _ROWS.get(call.mask)
    if kept is None or kept[0] != key:
        kept = _ROWS[call.mask] = (key, _build(call, call.mask))
    return kept[1]


_ROWS: WeakKeyDictionary[Mask, tuple[object, tuple[Tensor | None, Tensor | None]]] = WeakKeyDictionary()


def _build(call: AttentionInputs, mask: Mask) -> tuple[Tensor | None, Tensor | None]:
    allowed = call.allowed()
    assert allowed is not None
    if not mask.may_be_empty(call.T, call.S, query_offset=call.query_offset):
        return _as_bias(call, allowed), None
    seen = allowed.any(-1, keepdim=True)  # (…, T or 1, 1)
    # Asked where the answer is at hand: on a GPU it would have to be waited for.
    if is_concrete(seen) and seen.device.type == "cpu" and bool(seen.all()):
        return _as_bias(call, allowed), None
    return _as_bias(call, allowed | ~seen), seen


def _sees_everything(call: AttentionInputs) -> bool:
    """Decoding one token at a time: the newest query may see every key that is there."""
    return isinstance(call.mask, Causal) and call.T == 1 and call.query_offset >= call.S - 1


def _as_bias(call: AttentionInputs, allowed: Tensor | None) -> Tensor | None:
    if call.bias is None:
        if allowed is None or not call.q.is_cuda or call.q.dtype == call.acc_dtype:
            return allowed
        # Given a mask of bools, cuDNN's attention hides by −65,504, which a score may be below.
        return torch.zeros_like(allowed, dtype=call.q.dtype).masked_fill_(~allowed, -math.inf)
    # A temperature divides scores and bias together. CPU kernels add a float32 bias to half-precision scores; CUDA's
    # want the dtype of the queries.
    bias = call.scaled_bias().to(call.q.dtype if call.q.is_cuda and not needs_fp32_upcast(call) else call.acc_dtype)
    if call.q.is_cuda and (bias.stride()[-1:], bias.shape[-1:]) != ((1,), (call.S,)):  # CUDA's kernels read rows
        bias = bias.expand(*bias.shape[:-1], call.S).contiguous()
    bias = bias if allowed is None else bias.masked_fill(~allowed, -math.inf)
    return subtract_row_max(bias) if call.q.is_cuda and torch.is_grad_enabled() else bias


def subtract_row_max(bias: Tensor) -> Tensor:
    """The same weights by a bias whose rows have no large number for their largest: CUDA's backward pass raises e to a
    score less the sum of its row, and where both are 1e30 their last digits differ by more than any exponent holds."""
    most = bias.detach().amax(-1, keepdim=True)
    return bias - torch.where((most.abs() > _LARGE) & most.isfinite(), most, 0.0).to(bias.dtype)
