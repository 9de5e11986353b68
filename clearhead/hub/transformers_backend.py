"""An attention implementation for models of transformers, registered as "clearhead".

    import clearhead.hub.transformers_backend  # registers it
    model.set_attn_implementation("clearhead")

Masks of transformers (causal, sliding window, packed sequences) become mask expressions, so that the cost of a sliding
window is proportional to its width. Other masks are passed as tensors, as for torch's function.
"""

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
_UNBOUNDED = 1 << 30  # longer than any sequence


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
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute attention for a layer of transformers.

    Args:
        module: The attention layer.
        query: Queries, shape (B, H, T, D).
        key: Keys, shape (B, K, S, D).
        value: Values, shape (B, K, S, D).
        attention_mask: Result of `make_mask`, or a tensor.
        scaling: Factor of the scores; by default 1/√D.
        dropout: Dropout rate of the attention weights.
        is_causal: Use a causal mask if `attention_mask` is None; by default as the layer declares.
        position_bias: Added to the scores.
        **kwargs: Other arguments of the model; ignored, except those that change the scores, which are rejected.

    Returns:
        The output, shape (B, T, H, D), and None for the attention weights.
    """
    for name in ("softcap", "s_aux", "head_mask"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses {name}, which clearhead does not support; use the implementation 'eager'"
            )
    T, S = query.shape[-2], key.shape[-2]
    offset = S - T if isinstance(attention_mask, Mask) else None  # expressions are used only if the queries are last
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
    options: dict[str, Any] = {"scores": scores, "normalizer": Softmax(dropout=dropout), "bias": bias}
    out = attend_with_applied_masks(query, key, value, mask, **options, query_offset=offset)
    return out.transpose(1, 2).contiguous(), None


def make_mask(
    *,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    kv_length: int,
    kv_offset: int = 0,
    **kwargs: Any,
) -> Tensor | Mask | None:
    """Return the mask that a model of transformers passes to `attention`: an expression if possible, else a tensor."""
    is_padded = attention_mask is not None and not bool(attention_mask.all())
    offset = kwargs.get("q_offset")  # an integer in recent versions
    at_end = isinstance(offset, int) and offset + kwargs["q_length"] == kv_offset + kv_length
    mask = None if is_padded or not at_end else _expression(mask_function)
    if mask is not None and (kv_offset == 0 or not mask.batch_shape):
        return mask
    sizes = {"kv_length": kv_length, "kv_offset": kv_offset, "attention_mask": attention_mask}
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense: Tensor | None = masking_utils.sdpa_mask(mask_function=mask_function, **sizes, **kwargs | skips)
    return dense


def _expression(function: Callable[..., object]) -> Mask | None:
    """Return a mask function of transformers as a mask expression, or None if it is unknown."""
    name = function.__qualname__.removesuffix(".<locals>.inner_mask")
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    variables = {variable: cell.cell_contents for variable, cell in cells}
    if name == "and_masks.<locals>.and_mask":
        parts = [_expression(part) for part in variables["mask_functions"]]
        return None if any(part is None for part in parts) else reduce(operator.and_, parts, full())
    expressions: dict[str, Callable[[], Mask]] = {
        "causal_mask_function": causal,
        "bidirectional_mask_function": full,
        "sliding_window_overlay": lambda: window(variables["sliding_window"] - 1, _UNBOUNDED),
        "packed_sequence_mask_function": lambda: documents(variables["packed_sequence_mask"]),
    }
    return expressions[name]() if name in expressions else None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, make_mask)
