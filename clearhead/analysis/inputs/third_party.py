"""How the models of transformers, torch.nn, timm and x-transformers are called.

None of these libraries is imported: models are identified by their names.

B batch   T tokens   S source tokens   M model width
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from clearhead._core.call_types import Kwargs
from clearhead.analysis.inputs.module_spec import Caching, CallInputs, Embeddings, Ids, ModuleSpec, Values
from clearhead.masks import Mask, causal, full, window

ThirdParty: TypeAlias = Any  # an object of a library that is not imported


def infer_third_party(module: object) -> ModuleSpec | None:
    """Return the spec of a model of a known library, or None."""
    if not isinstance(module, nn.Module):
        return None
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return _transformers(module)
    if isinstance(module, (*_ENCODERS, *_DECODERS)):
        return _torch(module)
    timm_config = getattr(module, "default_cfg", None) or getattr(module, "pretrained_cfg", None)
    if type(module).__module__.startswith("timm.") and (timm_config or hasattr(module, "patch_embed")):
        return _timm(module, timm_config)
    return _x_transformers(module) if type(module).__module__.startswith("x_transformers.") else None


# ---------------------------------------------------------------------- transformers


def _transformers(model: ThirdParty) -> ModuleSpec | None:
    config = model.config
    names = set(inspect.signature(model.forward).parameters)
    if "pixel_values" in names and "input_ids" not in names:
        size = config.image_size
        shape = (config.num_channels, *((size, size) if isinstance(size, int) else size))
        return ModuleSpec(model, inputs=Values(shape), run=lambda model, batch: model(pixel_values=batch.x))
    vocab = getattr(config, "vocab_size", None)
    if vocab is None or "input_ids" not in names:
        return None
    max_len = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    ids = Ids(vocab)
    if config.is_encoder_decoder:
        # Only relative positions allow a shifted source, because positions cannot be passed to the encoder.
        is_relative = hasattr(config, "relative_attention_num_buckets")
        return ModuleSpec(
            model,
            inputs=ids,
            source=ids,
            positions=True,
            max_len=max_len,
            run=_run_pair,
            mask=causal(),
            takes_padding=True,
            left_padding=is_relative,
            left_target_padding=is_relative,
            takes_target_padding="decoder_attention_mask" in names,
            caching=_transformers_cache(pair=True),
        )
    is_causal = type(model).__name__.endswith("ForCausalLM") or any(
        getattr(part, "is_causal", False) is True for part in model.modules()
    )
    # Declared factor of the scores: 1/√scalar in Gemma 2, or the multiplier of Granite.
    scalar = getattr(config, "query_pre_attn_scalar", None)
    return ModuleSpec(
        model,
        inputs=ids,
        positions=True,
        max_len=max_len,
        run=partial(_run_ids, first=_first_position(model) if "position_ids" in names else None),
        mask=_pattern(config) if is_causal else full(),
        layers=getattr(config, "num_hidden_layers", None),
        scale=getattr(config, "attention_multiplier", None) if scalar is None else scalar**-0.5,
        takes_padding="attention_mask" in names,
        left_padding="position_ids" in names,
        caching=_transformers_cache(pair=False) if is_causal and "past_key_values" in names else None,
    )


def _first_position(model: nn.Module) -> int:
    """Return the position of the first token: 0, or the one after the padding row of the position table."""
    for part in model.modules():
        table = getattr(part, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0


def _pattern(config: object) -> Mask:
    """Return `causal()`, combined with a window if every layer has one."""
    width = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if width is None or any(kind != "sliding_attention" for kind in kinds):
        return causal()
    return causal() & window(width - 1, 0)  # its window includes the token itself


def _run_ids(model: ThirdParty, batch: CallInputs, first: int | None) -> object:
    """Call a model with ids; `first` is the position of the first token, or None if positions cannot be passed."""
    extra: Kwargs = {}
    keep = batch.keep
    if keep is not None:
        extra["attention_mask"] = keep.long()
    if first is not None and (keep is not None or (first and batch.cache is None)):
        keep = torch.ones_like(batch.x, dtype=torch.bool) if keep is None else keep
        extra["position_ids"] = (keep.long().cumsum(1) - 1).clamp(min=0) + first
    if batch.cache is not None:
        extra["past_key_values"] = batch.cache
    elif hasattr(model.config, "use_cache"):
        extra["use_cache"] = False
    return model(input_ids=batch.x, **extra)


def _run_pair(model: ThirdParty, batch: CallInputs) -> object:
    extra: Kwargs = {"use_cache": False} if batch.cache is None else {"past_key_values": batch.cache}
    for name, keep in (("attention_mask", batch.source_keep), ("decoder_attention_mask", batch.keep)):
        if keep is not None:
            extra[name] = keep.long()
    return model(input_ids=batch.source, decoder_input_ids=batch.x, **extra)


def _transformers_cache(*, pair: bool) -> Caching:
    def new() -> object:
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if pair else DynamicCache()

    def truncate(cache: ThirdParty, length: int) -> None:
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)

    return Caching(new=new, reorder=lambda cache, rows: cache.reorder_cache(rows), truncate=truncate)


# ---------------------------------------------------------------------- torch.nn


_ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_DECODERS = (nn.Transformer, nn.TransformerDecoder, nn.TransformerDecoderLayer)


def _torch(module: nn.Module) -> ModuleSpec:
    width = next((part.embed_dim for part in module.modules() if isinstance(part, nn.MultiheadAttention)), 8)
    batch_first = all(getattr(part, "batch_first", True) for part in module.modules())

    def to_batch_first(x: Tensor) -> Tensor:
        return x if batch_first else x.transpose(0, 1)

    def run_encoder(model: ThirdParty, batch: CallInputs) -> object:
        hidden = None if batch.keep is None else ~batch.keep
        x = to_batch_first(batch.x)
        if isinstance(module, nn.MultiheadAttention):
            return to_batch_first(model(x, x, x, key_padding_mask=hidden, need_weights=False)[0])
        return to_batch_first(model(x, src_key_padding_mask=hidden))

    def run_decoder(model: ThirdParty, batch: CallInputs) -> object:
        def padding_bias(keep: Tensor | None) -> Tensor | None:
            """Return padding as floats, because torch requires one dtype for both masks of a call."""
            return None if keep is None else batch.x.new_zeros(keep.shape).masked_fill(~keep, float("-inf"))

        future = nn.Transformer.generate_square_subsequent_mask(batch.x.shape[1], dtype=batch.x.dtype)
        source_padding = padding_bias(batch.source_keep)
        masks = {
            "tgt_mask": future,
            "tgt_key_padding_mask": padding_bias(batch.keep),
            "memory_key_padding_mask": source_padding,
        }
        x, source = to_batch_first(batch.x), to_batch_first(batch.required_source)
        if isinstance(module, nn.Transformer):
            return to_batch_first(model(source, x, src_key_padding_mask=source_padding, **masks))
        return to_batch_first(model(x, source, **masks))

    vectors = Embeddings(width)
    is_decoder = isinstance(module, _DECODERS)
    return ModuleSpec(
        module,
        name=f"torch.nn.{type(module).__name__}",
        inputs=vectors,
        source=vectors if is_decoder else None,
        run=run_decoder if is_decoder else run_encoder,
        mask=causal() if is_decoder else full(),
        positions=False,
        takes_padding=True,
        takes_target_padding=is_decoder,
    )


# ---------------------------------------------------------------------- timm


def _timm(module: nn.Module, timm_config: ThirdParty) -> ModuleSpec:
    size = (3, 224, 224)
    if timm_config:
        size = timm_config["input_size"] if isinstance(timm_config, dict) else timm_config.input_size
    patches: ThirdParty = getattr(module, "patch_embed", None)
    img_size = getattr(patches, "img_size", None)  # the actual size
    if img_size is not None:
        size = (patches.proj.in_channels if hasattr(patches, "proj") else size[0], *img_size)
    return ModuleSpec(module, name=f"timm {type(module).__name__}", inputs=Values(tuple(size)))


# ---------------------------------------------------------------------- x-transformers

# Masks are True for real tokens; `seq_start_pos` is the start of each row. A cache is the output of the last call, and
# the next call passes its number of new tokens (`cache_age`).


def _x_transformers(model: ThirdParty) -> ModuleSpec | None:
    """Return the spec of a wrapper (a full model), or None for its parts."""
    kind = type(model).__name__
    if kind == "ViTransformerWrapper":
        n_patches = model.pos_embedding.shape[1]
        n_values = model.patch_to_embedding[1].in_features
        side = model.patch_size * round(n_patches**0.5)
        return ModuleSpec(
            model, name="x-transformers ViT", inputs=Values((n_values // model.patch_size**2, side, side))
        )
    if kind == "XTransformer":
        net = model.decoder.net
        return ModuleSpec(
            model,
            name="x-transformers XTransformer",
            inputs=_token_ids(net),
            source=_token_ids(model.encoder),
            run=_run_x_pair,
            mask=_x_mask(net.attn_layers),
            positions=True,
            takes_padding=True,
            takes_target_padding=True,
            max_len=min(net.max_seq_len, model.encoder.max_seq_len),
        )
    if kind != "TransformerWrapper" or model.attn_layers.cross_attend:
        return None
    layers = model.attn_layers
    return ModuleSpec(
        model,
        name=f"x-transformers {type(layers).__name__}",
        inputs=_token_ids(model),
        run=_run_x,
        mask=_x_mask(layers),
        layers=sum(type(part).__name__ == "Attention" for part in layers.modules()),
        positions=True,
        takes_padding=True,
        caching=Caching(new=_XTransformersCache) if layers.causal else None,
        max_len=model.max_seq_len,
    )


class _XTransformersCache:
    """The output of the last call: keys and values of every layer."""

    last: ThirdParty = None

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.last.attn_intermediates:
            if layer.cached_kv is not None:
                layer.cached_kv = tuple(change(x) for x in layer.cached_kv)

    def reorder(self, rows: Tensor) -> None:
        self._change(lambda x: x[rows])

    def crop(self, length: int) -> None:
        self._change(lambda x: x[..., :length, :])
        self.last.cache_length = length


def _token_ids(model: ThirdParty) -> Ids:
    return Ids(model.token_emb.emb.num_embeddings)


def _x_mask(layers: ThirdParty) -> Mask:
    if not layers.causal:
        return full()
    lookbacks = [getattr(part, "max_attend_past", None) for part in layers.modules()]
    limits = [n for n in lookbacks if n is not None]
    return causal() & window(max(limits), 0) if limits else causal()


def _padding(keep: Tensor | None) -> Kwargs:
    if keep is None:
        return {}
    first = keep.int().argmax(1)
    return {"mask": keep, **({"seq_start_pos": first} if bool(first.any()) else {})}


def _run_x(model: ThirdParty, batch: CallInputs) -> object:
    if batch.cache is None:
        return model(batch.x, **_padding(batch.keep))
    last = batch.cache.last
    new = {} if last is None else {"cache": last, "input_not_include_cache": True, "cache_age": batch.x.shape[1]}
    out, batch.cache.last = model(batch.x, return_intermediates=True, **new, **_padding(batch.keep))
    return out


def _run_x_pair(model: ThirdParty, batch: CallInputs) -> object:
    memory = model.encoder(batch.source, return_embeddings=True, **_padding(batch.source_keep))
    masks = {} if batch.source_keep is None else {"context_mask": batch.source_keep}
    return model.decoder.net(batch.x, context=memory, **masks, **_padding(batch.keep))
