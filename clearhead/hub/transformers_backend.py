"""Our attention in the models of transformers, by that library's own interface.

    import clearhead.hub.transformers_backend                 # makes the name "clearhead" known there
    model.set_attn_implementation("clearhead")

What a model says of its mask (causal, a sliding window, packed sequences) becomes a mask expression, so that a window
costs a window; what has no expression here is a mask of numbers, as it is for torch's own function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import Scaled, ScaledDot
from clearhead.errors import ConfigError
from clearhead.masks import Mask, allow, causal, documents, full, window
from clearhead.nn.apply_mask import attend_with_applied_masks

NAME = "clearhead"
_FAR = 1 << 30  # no text is longer


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """(B, H, T, D) queries and (B, K, S, D) keys and values, as models of transformers have them → (B, T, H, D)."""
    for name in ("softcap", "s_aux", "head_mask"):
        if others.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} asks for {name}, which attend has not; use 'eager' for it")
    T, S = query.shape[-2], key.shape[-2]
    offset = S - T if isinstance(attention_mask, Mask) else None  # what has one expression stands at the end
    bias, mask = position_bias, attention_mask
    if isinstance(mask, Tensor):
        mask = mask[..., :S]
        if mask.is_floating_point():
            bias, mask = mask if bias is None else bias + mask, None
        else:
            mask = allow(mask.expand(*mask.shape[:-2], T, S))
    elif mask is None and T > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        mask = causal()
    scores = ScaledDot() if scaling is None else Scaled(float(scaling))
    how: dict[str, Any] = {"scores": scores, "normalizer": Softmax(dropout=dropout), "bias": bias}
    out = attend_with_applied_masks(query, key, value, mask, **how, query_offset=offset)
    return out.transpose(1, 2).contiguous(), None


def mask_of(
    *,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    kv_length: int,
    kv_offset: int = 0,
    **others: Any,
) -> Tensor | Mask | None:
    """What a model of transformers hands to `attention` as its mask: an expression, where there is one."""
    is_padded = attention_mask is not None and not bool(attention_mask.all())
    first = others.get("q_offset")  # where the queries begin, in versions that say so in a whole number
    at_end = isinstance(first, int) and first + others["q_length"] == kv_offset + kv_length
    found = None if is_padded or not at_end else _expression(mask_function)
    if found is not None and (kv_offset == 0 or not found.batch_shape):
        return found
    sizes = {"kv_length": kv_length, "kv_offset": kv_offset, "attention_mask": attention_mask}
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(mask_function=mask_function, **sizes, **others | skips)


def _expression(function: Callable[..., Any]) -> Mask | None:
    """A mask function of transformers as a mask; None for one that is not known here."""
    name = function.__qualname__.removesuffix(".<locals>.inner_mask")
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    inside = {variable: cell.cell_contents for variable, cell in cells}
    if name == "and_masks.<locals>.and_mask":
        parts = [_expression(part) for part in inside["mask_functions"]]
        return None if any(part is None for part in parts) else reduce(operator.and_, parts, full())
    known: dict[str, Callable[[], Mask]] = {
        "causal_mask_function": causal,
        "bidirectional_mask_function": full,
        "sliding_window_overlay": lambda: window(inside["sliding_window"] - 1, _FAR),
        "packed_sequence_mask_function": lambda: documents(inside["packed_sequence_mask"]),
    }
    return known[name]() if name in known else None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask_of)
