"""Name our keyword when a call uses that of another library.

`explain_keywords` decorates a function or a class. A call with a keyword that it does not have raises a TypeError that
names the keyword to use instead, for example `num_beams` → `strategy=BeamSearch(…)`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

from clearhead._core.validation import did_you_mean
from clearhead.errors import KeywordError

C = TypeVar("C", bound=Callable[..., Any])

# Keywords of PyTorch, transformers, nanoGPT and others, and ours: the first that the function has, or advice.
CONVENTIONAL: dict[str, tuple[str, ...]] = {
    "attention_mask": ("mask", "source_mask", "masks.padding(lengths) as the mask"),
    "attn_mask": ("mask", "masks.allow(tensor) as the mask"),
    "block_size": ("max_len",),
    "context_length": ("max_len",),
    "depth": ("n_layers",),
    "device_map": ("device",),
    "dim": ("d_model",),
    "dim_feedforward": ("d_ff",),
    "do_sample": ("strategy=Sample(…)",),
    "dropout_p": ("dropout",),
    "embed_dim": ("d_model",),
    "eos_token_id": ("stop_ids", "a pipeline, which has the model's own stop ids"),
    "ffn_dim": ("d_ff",),
    "head_dim": ("d_head",),
    "hidden_act": ("activation",),
    "hidden_dim": ("d_ff",),
    "hidden_size": ("d_model",),
    "input_ids": ("ids", "prompt"),
    "intermediate_size": ("d_ff",),
    "is_causal": ("mask=masks.causal()",),
    "key_padding_mask": ("mask=masks.padding(lengths)",),
    "max_length": ("max_new_tokens", "max_len"),
    "max_new": ("max_new_tokens",),
    "max_position_embeddings": ("max_len",),
    "max_tokens": ("max_new_tokens", "max_len"),
    "max_new_tokens": ("max_len",),
    "n_embd": ("d_model",),
    "n_head": ("n_heads",),
    "n_inner": ("d_ff",),
    "n_kv_head": ("n_kv_heads",),
    "n_layer": ("n_layers",),
    "n_positions": ("max_len",),
    "nhead": ("n_heads",),
    "num_attention_heads": ("n_heads",),
    "num_beams": ("width", "strategy=BeamSearch(width)"),
    "num_heads": ("n_heads",),
    "num_hidden_layers": ("n_layers",),
    "num_key_value_heads": ("n_kv_heads",),
    "num_layers": ("n_layers", "n_encoder_layers"),
    "num_return_sequences": ("n_best", "strategy=BeamSearch(width, n_best=n)"),
    "past_key_values": ("cache",),
    "position_ids": ("positions",),
    "repetition_penalty": ("logits_processors=LogitsProcessors(repetition_penalty=…)",),
    "temperature": ("strategy=Sample(temperature=…)",),
    "token_type_ids": ("segments",),
    "top_k": ("strategy=Sample(top_k=…)",),
    "top_p": ("strategy=Sample(top_p=…)",),
    "torch_dtype": ("dtype",),
    # Names of version 0.2.
    "how": ("strategy",),
    "slide": ("sliding_context",),
    "start": ("decoder_start_ids",),
    "stop": ("stop_ids",),
}


def explain_keywords(target: C) -> C:
    """Decorate a function or a class: unknown keywords raise an error that names ours.

    Args:
        target: A function, or a class whose `__init__` is replaced.

    Returns:
        The decorated function, or the class.
    """
    if inspect.isclass(target):
        target.__init__ = explain_keywords(target.__init__)  # type: ignore[method-assign]
        return target
    parameters = inspect.signature(target).parameters
    accepted = frozenset(name for name in parameters if name != "self")
    name = target.__qualname__.removesuffix(".__init__")

    @functools.wraps(target)
    def wrapper(*args: object, **kwargs: object) -> object:
        for keyword in kwargs:
            if keyword not in accepted:
                raise keyword_error(keyword, accepted, name)
        return target(*args, **kwargs)

    return cast(C, wrapper)


def reject_unknown_keywords(keywords: Iterable[str], accepted: Collection[str], name: str) -> None:
    """Raise `KeywordError` for the first keyword that is not known."""
    for keyword in keywords:
        if keyword not in accepted:
            raise keyword_error(keyword, accepted, name)


def keyword_error(keyword: str, accepted: Collection[str], name: str) -> KeywordError:
    """Return the error for an unknown keyword of the function `name`."""
    alternatives = CONVENTIONAL.get(keyword, ())
    for alternative in alternatives:
        option = alternative.partition("=")[0]
        if option in accepted or not option.isidentifier():
            return KeywordError(f"{name} has no keyword {keyword!r}; use {alternative}")
    hint = did_you_mean(keyword, accepted, fallback=f"expected one of: {', '.join(sorted(accepted))}")
    return KeywordError(f"{name} has no keyword {keyword!r}; {hint}")
