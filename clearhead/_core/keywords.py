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
    "alibi_slopes": ("bias=alibi(n_heads)",),
    "attention_mask": ("mask", "source_mask", "lengths", "masks.padding(lengths) as the mask"),
    "attn_bias": ("bias",),
    "attn_mask": ("mask", "masks.allow(tensor) as the mask"),
    "average_attn_weights": ("clearhead.trace(model), which records attention weights",),
    "bad_words_ids": (
        "logits_processors=LogitsProcessors(bad_words_ids=…)",
        "clearhead.generate(pipeline.model, …, logits_processors=LogitsProcessors(bad_words_ids=…))",
    ),
    "batch_first": ("tensors of shape (batch, tokens, features), the only layout",),
    "batch_size": ("batch", "overrides={'batch': …}"),
    "block_mask": ("mask",),
    "block_size": ("max_len", "size"),
    "callbacks": ("progress",),
    "causal": ("mask=masks.causal()",),
    "context_length": ("max_len",),
    "cu_seqlens": ("mask=masks.documents(ids)", "ids"),
    "dataset": ("data",),
    "decoder_attention_mask": ("target_mask",),
    "decoder_input_ids": ("target",),
    "depth": ("n_layers",),
    "device_map": ("device",),
    "dim": ("d_model",),
    "dim_feedforward": ("d_ff",),
    "do_sample": ("strategy=Sample(…)",),
    "document_ids": ("ids",),
    "dropout": ("overrides={'model.dropout': …}", "the dropout of MultiHeadAttention or of a configuration"),
    "dropout_p": ("dropout", "dropout of MultiHeadAttention"),
    "early_stopping": ("strategy=BeamSearch(width, early_stopping=…)",),
    "embed_dim": ("d_model",),
    "enable_gqa": ("fewer heads in k and v; no keyword is needed",),
    "eos_token_id": ("stop_ids", "a pipeline, which has the model's own stop ids"),
    "epochs": ("overrides={'epochs': …}",),
    "epsilon": ("eps",),
    "ffn_dim": ("d_ff",),
    "fwd_hooks": ("clearhead.trace(model).intervene(path, …)",),
    "generation_config": ("strategy",),
    "gradient_accumulation_steps": ("accumulation", "overrides={'accumulation': …}"),
    "head": ("heads",),
    "head_dim": ("d_head",),
    "head_index": ("heads",),
    "hidden_act": ("activation",),
    "hidden_dim": ("d_ff",),
    "hidden_size": ("d_model",),
    "input_ids": ("ids", "prompt", "source"),
    "input_size": ("inputs",),
    "inputs": ("texts",),
    "intermediate_size": ("d_ff",),
    "is_causal": ("causal", "mask=masks.causal()"),
    "kdim": ("d_key",),
    "key_padding_mask": ("mask=masks.padding(lengths)", "lengths"),
    "KV_LEN": ("S",),
    "labels": ("torch.nn.functional.cross_entropy with the logits that it returns",),
    "layer_norm_eps": ("eps", "norm=LayerNorm(eps=…)"),
    "layer_norm_epsilon": ("eps", "norm=LayerNorm(eps=…)"),
    "learning_rate": ("schedule=WarmupCosine(lr_max=…)", "overrides={'lr_max': …}"),
    "left": ("before",),
    "length_penalty": ("strategy=BeamSearch(width, length_penalty=…)",),
    "logits_soft_cap": ("scores=SoftCapped(cap)",),
    "lr": ("schedule=WarmupCosine(lr_max=…)", "overrides={'lr_max': …}"),
    "map_location": ("device",),
    "mask_mod": ("function", "mask=masks.from_function(mask_mod, T)"),
    "max_grad_norm": ("clip", "overrides={'clip': …}"),
    "max_length": ("max_new_tokens", "max_len"),
    "max_new": ("max_new_tokens",),
    "max_new_tokens": ("max_len",),
    "max_position_embeddings": ("max_len",),
    "max_steps": ("steps", "overrides={'steps': …}"),
    "max_tokens": ("max_new_tokens", "max_len"),
    "min_length": (
        "logits_processors=LogitsProcessors(min_length=…)",
        "clearhead.generate(pipeline.model, …, logits_processors=LogitsProcessors(min_length=…))",
    ),
    "min_new_tokens": (
        "logits_processors=LogitsProcessors(min_new_tokens=…)",
        "clearhead.generate(pipeline.model, …, logits_processors=LogitsProcessors(min_new_tokens=…))",
    ),
    "min_p": ("strategy=Sample(min_p=…)",),
    "model": ("name",),
    "n_ctx": ("max_len",),
    "n_embd": ("d_model",),
    "n_head": ("n_heads",),
    "n_inner": ("d_ff",),
    "n_kv_head": ("n_kv_heads",),
    "n_layer": ("n_layers",),
    "n_positions": ("max_len",),
    "names_filter": ("patterns, such as run_with_cache(model, inputs, 'blocks.*.output')",),
    "need_weights": ("clearhead.trace(model), which records attention weights",),
    "nhead": ("n_heads",),
    "no_repeat_ngram_size": (
        "logits_processors=LogitsProcessors(no_repeat_ngram_size=…)",
        "clearhead.generate(pipeline.model, …, logits_processors=LogitsProcessors(no_repeat_ngram_size=…))",
    ),
    "norm_first": ("residual=PreNorm()",),
    "num_attention_heads": ("n_heads",),
    "num_beams": ("width", "beam", "strategy=BeamSearch(width)"),
    "num_epochs": ("epochs", "overrides={'epochs': …}"),
    "num_heads": ("n_heads",),
    "num_hidden_layers": ("n_layers",),
    "num_key_value_heads": ("n_kv_heads",),
    "num_layers": ("n_layers", "n_encoder_layers"),
    "num_return_sequences": ("n_best", "strategy=BeamSearch(width, n_best=n)"),
    "num_train_epochs": ("epochs", "overrides={'epochs': …}"),
    "output_attentions": ("clearhead.trace(model), which records attention weights",),
    "output_dir": ("out", "folder"),
    "output_hidden_states": ("analysis.run_with_cache(model, inputs)",),
    "pad_token_id": ("a list of prompts of different lengths, which needs no padding",),
    "past_key_values": ("cache",),
    "path": ("folder", "name"),
    "position_ids": ("positions",),
    "pretrained_model_name_or_path": ("name",),
    "prefix_length": ("n",),
    "prompt": ("texts", "text"),
    "Q_LEN": ("T",),
    "repetition_penalty": (
        "logits_processors=LogitsProcessors(repetition_penalty=…)",
        "clearhead.generate(pipeline.model, …, logits_processors=LogitsProcessors(repetition_penalty=…))",
    ),
    "resume_from_checkpoint": ("resume",),
    "return_full_text": ("the prompt and the returned text, which does not contain it",),
    "return_timestamps": ("timestamps",),
    "revision": ("a name such as 'org/name@revision'",),
    "right": ("after",),
    "rms_norm_eps": ("eps", "norm=RMSNorm(eps=…)"),
    "rope_theta": ("base", "positions=Rotary(base=…)"),
    "save_directory": ("folder",),
    "scale": ("scores=Scaled(factor)",),
    "score_mod": ("bias=…, an expression such as alibi(n_heads) + distance(…)", "scores=…"),
    "seed": ("strategy=Sample(seed=…)", "overrides={'seed': …}"),
    "seq_len": ("tokens", "max_len"),
    "size": ("before",),
    "sliding_window": ("mask=masks.causal() & masks.window(before, 0)",),
    "softcap": ("scores=SoftCapped(cap)",),
    "src": ("source",),
    "src_key_padding_mask": ("source_mask",),
    "steps": ("overrides={'steps': …}",),
    "stop_strings": ("stop_ids",),
    "streamer": ("stream, which yields each token",),
    "stride": ("step",),
    "suppress_tokens": (
        "logits_processors=LogitsProcessors(suppress_tokens=…)",
        "clearhead.generate(pipeline.model, …, logits_processors=LogitsProcessors(suppress_tokens=…))",
    ),
    "temperature": ("strategy=Sample(temperature=…)", "Sample(temperature=…)"),
    "tgt": ("target",),
    "tgt_mask": ("target_mask",),
    "theta": ("base",),
    "token_type_ids": ("segments",),
    "tokens": ("inputs",),
    "top_k": ("n", "strategy=Sample(top_k=…)"),
    "top_p": ("strategy=Sample(top_p=…)",),
    "torch_dtype": ("dtype",),
    "train_dataset": ("data",),
    "vdim": ("d_value",),
    "vocab_size": ("inputs=Ids(vocab_size)",),
    "vocabulary_size": ("vocab_size", "inputs=Ids(vocab_size)"),
    "warmup_steps": ("schedule=WarmupCosine(warmup_steps=…)", "overrides={'warmup_steps': …}"),
    "weight_decay": ("overrides={'weight_decay': …}",),
    "window_size": ("mask=masks.window(before, after)", "before"),
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
    fallback = f"expected one of: {', '.join(sorted(accepted))}" if accepted else "it takes none"
    return KeywordError(f"{prefix}; {did_you_mean(keyword, accepted, fallback=fallback)}")
