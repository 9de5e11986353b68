"""How the models of transformers, torch.nn and timm are called. None of them is imported: they are known by
their names.

B batch   T tokens   S source tokens   M model width
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.checks import x_transformers
from clearhead.checks.subject import Batch, Caching, Embeddings, Ids, Subject, Values
from clearhead.masks import Mask, causal, full, window


def guess(module: Any) -> Subject | None:
    """The subject of a model of a known library; None for anything else."""
    if not isinstance(module, nn.Module):
        return None
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return _transformers(module)
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)):
        return _torch_encoder(module)
    if isinstance(module, (nn.Transformer, nn.TransformerDecoder, nn.TransformerDecoderLayer)):
        return _torch_decoder(module)
    picture = getattr(module, "default_cfg", None) or getattr(module, "pretrained_cfg", None)
    if type(module).__module__.startswith("timm.") and (picture or hasattr(module, "patch_embed")):
        return _timm(module, picture)
    return x_transformers.guess(module)


# ---------------------------------------------------------------------- transformers


def _transformers(model: Any) -> Subject | None:
    config = model.config
    names = set(inspect.signature(model.forward).parameters)
    if "pixel_values" in names and "input_ids" not in names:
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return Subject(model, inputs=Values((config.num_channels, height, width)), run=_run_pixels)
    vocab = getattr(config, "vocab_size", None)
    if vocab is None or "input_ids" not in names:
        return None
    room = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    reads: dict[str, Any] = {"inputs": Ids(vocab), "positions": True, "max_len": room}
    if config.is_encoder_decoder:
        # Only relative positions do not notice that the source has moved; no argument could tell the encoder.
        left = hasattr(config, "relative_attention_num_buckets")
        return Subject(
            model, **reads, source=Ids(vocab), run=_run_pair, sees=causal(), pads=True, left=left, left_target=left,
            pads_target="decoder_attention_mask" in names, caching=_transformers_cache(pair=True),
        )  # fmt: skip
    looks_back = type(model).__name__.endswith("ForCausalLM") or any(
        getattr(part, "is_causal", False) is True for part in model.modules()
    )
    first = _first_place(model) if "position_ids" in names else None

    def run(module: Any, batch: Batch) -> Any:
        return _run_ids(module, batch, first)

    return Subject(
        model, **reads, run=run, sees=_pattern(config) if looks_back else full(),
        layers=getattr(config, "num_hidden_layers", None), scale=_declared_scale(config),
        pads="attention_mask" in names, left="position_ids" in names,
        caching=_transformers_cache(pair=False) if looks_back and "past_key_values" in names else None,
    )  # fmt: skip


def _declared_scale(config: Any) -> float | None:
    """What the configuration says that scores are multiplied by: 1/√scalar as Gemma 2 has it, or Granite's factor."""
    scalar = getattr(config, "query_pre_attn_scalar", None)
    return getattr(config, "attention_multiplier", None) if scalar is None else scalar**-0.5


def _run_pixels(model: Any, batch: Batch) -> Any:
    return model(pixel_values=batch.x)


def _first_place(model: nn.Module) -> int:
    """The position of the first token: 0, or where a row of the table is kept for padding, the one after it."""
    for part in model.modules():
        table = getattr(part, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0


def _pattern(config: Any) -> Mask:
    """`causal()`, within a window where every layer has one."""
    width = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if width is None or any(kind != "sliding_attention" for kind in kinds):
        return causal()
    return causal() & window(width - 1, 0)  # its window counts the token itself


def _run_ids(model: Any, batch: Batch, first: int | None) -> Any:
    """`first` is the first token's position; None: positions cannot be passed."""
    extra: dict[str, Any] = {}
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


def _run_pair(model: Any, batch: Batch) -> Any:
    extra: dict[str, Any] = {"use_cache": False} if batch.cache is None else {"past_key_values": batch.cache}
    for name, keep in (("attention_mask", batch.source_keep), ("decoder_attention_mask", batch.keep)):
        if keep is not None:
            extra[name] = keep.long()
    return model(input_ids=batch.source, decoder_input_ids=batch.x, **extra)


def _transformers_cache(*, pair: bool) -> Caching:
    def new() -> Any:
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if pair else DynamicCache()

    def reorder(cache: Any, rows: Tensor) -> None:
        cache.reorder_cache(rows)

    def truncate(cache: Any, length: int) -> None:
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)

    return Caching(new=new, reorder=reorder, truncate=truncate)


# ---------------------------------------------------------------------- torch.nn


def _torch_encoder(module: nn.Module) -> Subject:
    turn = _turn(module)

    def run(model: Any, batch: Batch) -> Any:
        hidden, x = None if batch.keep is None else ~batch.keep, turn(batch.x)
        if isinstance(module, nn.MultiheadAttention):
            return turn(model(x, x, x, key_padding_mask=hidden, need_weights=False)[0])
        return turn(model(x, src_key_padding_mask=hidden))

    return _torch(module, run, sees=full())


def _torch_decoder(module: nn.Module) -> Subject:
    turn, pair = _turn(module), isinstance(module, nn.Transformer)

    def run(model: Any, batch: Batch) -> Any:
        x, source = turn(batch.x), turn(batch.source)
        hidden = _hidden(batch.source_keep, batch.x)
        told = {"memory_key_padding_mask": hidden, "tgt_key_padding_mask": _hidden(batch.keep, batch.x)}
        told["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(batch.x.shape[1], dtype=batch.x.dtype)
        if pair:
            return turn(model(source, x, src_key_padding_mask=hidden, **told))
        return turn(model(x, source, **told))

    return _torch(module, run, source=Embeddings(_width(module)), sees=causal(), pads_target=True)


def _torch(module: nn.Module, run: Any, **how: Any) -> Subject:
    name = f"torch.nn.{type(module).__name__}"
    return Subject(module, name=name, inputs=Embeddings(_width(module)), run=run, positions=False, pads=True, **how)


def _width(module: nn.Module) -> int:
    return next((part.embed_dim for part in module.modules() if isinstance(part, nn.MultiheadAttention)), 8)


def _turn(module: nn.Module) -> Callable[[Any], Any]:
    """Batch first, whatever the module was made for."""
    batch_first = all(getattr(part, "batch_first", True) for part in module.modules())
    return (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))


def _hidden(keep: Tensor | None, x: Tensor) -> Tensor | None:
    """Padding as numbers: torch wants the two masks of a call in one dtype."""
    return None if keep is None else x.new_zeros(keep.shape).masked_fill(~keep, float("-inf"))


# ---------------------------------------------------------------------- timm


def _timm(module: nn.Module, picture: Any) -> Subject:
    size = (3, 224, 224)
    if picture:
        size = picture["input_size"] if isinstance(picture, dict) else picture.input_size
    patches: Any = getattr(module, "patch_embed", None)
    own = getattr(patches, "img_size", None)  # the size it was really made for
    if own is not None:
        channels = patches.proj.in_channels if hasattr(patches, "proj") else size[0]
        size = (channels, *own)
    return Subject(module, name=f"timm {type(module).__name__}", inputs=Values(tuple(size)))
