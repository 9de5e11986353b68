"""Name our keyword when a call uses that of another library.

`explain_keywords` decorates a function or a class. A call with a keyword that it does not have raises a TypeError that
names the keyword to use instead, for example `num_beams` → `strategy=BeamSearch(…)`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar, cast

from clearhead._core.validation import did_you_mean
from clearhead.errors import KeywordError

C = TypeVar("C", bound=Callable[..., object])

# Keywords of PyTorch, transformers, nanoGPT and others, and ours: the first that the function has, or advice.
CONVENTIONAL: dict[str, tuple[str, ...]] = {
    "attention_mask": ("mask", "source_mask", "masks.padding(lengths) as the mask"),
    "attn_mask": ("mask", "masks.allow(tensor) as the mask"),
    "batch_size": ("batch", "overrides={'batch': …}"),
    "block_size": ("max_len",),
    "context_length": ("max_len",),
    "depth": ("n_layers",),
    "device_map": ("device",),
    "dim": ("d_model",),
    "dim_feedforward": ("d_ff",),
    "do_sample": ("strategy=Sample(…)",),
    "dropout_p": ("dropout", "dropout of MultiHeadAttention"),
    "embed_dim": ("d_model",),
    "eos_token_id": ("stop_ids", "a pipeline, which has the model's own stop ids"),
    "enable_gqa": ("fewer heads in k and v; no keyword is needed",),
    "ffn_dim": ("d_ff",),
    "gradient_accumulation_steps": ("accumulation", "overrides={'accumulation': …}"),
    "head_dim": ("d_head",),
    "hidden_act": ("activation",),
    "hidden_dim": ("d_ff",),
    "hidden_size": ("d_model",),
    "input_ids": ("ids", "prompt"),
    "intermediate_size": ("d_ff",),
    "is_causal": ("mask=masks.causal()",),
    "key_padding_mask": ("mask=masks.padding(lengths)",),
    "learning_rate": ("schedule=WarmupCosine(lr_max=…)", "overrides={'lr_max': …}"),
    "lr": ("schedule=WarmupCosine(lr_max=…)", "overrides={'lr_max': …}"),
    "max_grad_norm": ("clip", "overrides={'clip': …}"),
    "max_length": ("max_new_tokens", "max_len"),
    "max_new": ("max_new_tokens",),
    "max_position_embeddings": ("max_len",),
    "max_tokens": ("max_new_tokens", "max_len"),
    "max_new_tokens": ("max_len",),
    "max_steps": ("steps", "overrides={'steps': …}"),
    "n_embd": ("d_model",),
    "n_head": ("n_heads",),
    "model": ("name",),
    "n_ctx": ("max_len",),
    "n_inner": ("d_ff",),
    "n_kv_head": ("n_kv_heads",),
    "n_layer": ("n_layers",),
    "n_positions": ("max_len",),
    "names_filter": ("patterns, such as run_with_cache(model, inputs, 'blocks.*.output')",),
    "nhead": ("n_heads",),
    "num_epochs": ("epochs", "overrides={'epochs': …}"),
    "num_attention_heads": ("n_heads",),
    "num_beams": ("width", "strategy=BeamSearch(width)"),
    "num_heads": ("n_heads",),
    "num_hidden_layers": ("n_layers",),
    "num_key_value_heads": ("n_kv_heads",),
    "num_layers": ("n_layers", "n_encoder_layers"),
    "num_return_sequences": ("n_best", "strategy=BeamSearch(width, n_best=n)"),
    "num_train_epochs": ("epochs", "overrides={'epochs': …}"),
    "output_attentions": ("clearhead.trace(model), which records attention weights",),
    "output_hidden_states": ("analysis.run_with_cache(model, inputs)",),
    "pad_token_id": ("a list of prompts of different lengths, which needs no padding",),
    "past_key_values": ("cache",),
    "position_ids": ("positions",),
    "repetition_penalty": ("logits_processors=LogitsProcessors(repetition_penalty=…)",),
    "pretrained_model_name_or_path": ("name",),
    "save_directory": ("folder",),
    "return_timestamps": ("timestamps",),
    "scale": ("scores=Scaled(factor)",),
    "seq_len": ("tokens", "max_len"),
    "temperature": ("strategy=Sample(temperature=…)",),
    "token_type_ids": ("segments",),
    "top_k": ("n", "strategy=Sample(top_k=…)"),
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
    parameters = inspect.signature(target).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    accepted = frozenset(p.name for p in parameters if p.name != "self" and p.kind not in variadic)
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
    prefix = f"{name} has no keyword {keyword!r}"
    alternatives = CONVENTIONAL.get(keyword, ())
    for alternative in alternatives:
        option = alternative.partition("=")[0]
        if option in accepted or not option.isidentifier():
            return KeywordError(f"{prefix}; use {alternative}")
    if alternatives and "config" in accepted:
        return KeywordError(f"{prefix}; use {alternatives[0]} in its configuration")
    if alternatives and not accepted:
        return KeywordError(f"{prefix}; use {name}().replace({alternatives[0]}=…)")
    fallback = f"expected one of: {', '.join(sorted(accepted))}" if accepted else "it takes none"
    return KeywordError(f"{prefix}; {did_you_mean(keyword, accepted, fallback=fallback)}")
