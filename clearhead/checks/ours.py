"""How the models of this project are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead import models
from clearhead.attention import KVCache, MultiHeadAttention
from clearhead.checks.subject import Caching, CallInputs, Embeddings, Ids, ModuleSpec, Values
from clearhead.layers import Block
from clearhead.masks import Mask, causal, full, padding, window
from clearhead.masks.operators import is_causal, is_translation_invariant
from clearhead.models.recurrent import NextToken, RecurrentCache
from clearhead.positions import LearnedPositions, NoPE


def guess(module: Any) -> ModuleSpec | None:
    """The spec of a model of this project; None for anything else."""
    kind = getattr(module, "_orig_mod", module)  # what torch.compile wraps
    for known, make in _KNOWN.items():
        if isinstance(kind, known):
            made = make(kind)
            return None if made is None else replace(made, module=module, name=known.__name__)
    return None


def _hidden(keep: Tensor | None) -> Mask | None:
    """`padding(…)` for rows whose real tokens are one run."""
    return None if keep is None else padding(keep.sum(1), left_pad=keep.int().argmax(1))


def _stack_extra(model: Any, keep: Tensor | None) -> dict[str, Any]:
    extra: dict[str, Any] = {"mask": _hidden(keep)}
    if keep is not None and model.config.positions.kind == "added":
        extra["positions"] = (keep.long().cumsum(1) - 1).clamp(min=0)  # (B, T), from each row's first real token
    return extra


def _run_stack(model: Any, batch: CallInputs) -> Any:
    cache = {} if batch.cache is None else {"cache": batch.cache}
    return model(batch.x, **cache, **_stack_extra(model, batch.keep))


def _run_encoder_decoder(model: Any, batch: CallInputs) -> Any:
    memory = model.encode(batch.source, **_stack_extra(model.encoder, batch.source_keep))
    told = _stack_extra(model.decoder, batch.keep)
    return model.decode(batch.x, memory, memory_mask=_hidden(batch.source_keep), cache=batch.cache, **told)


def _run_recurrent_pair(model: Any, batch: CallInputs) -> Any:
    mask = _hidden(batch.source_keep)
    return model.decode(batch.x, model.encode(batch.source, mask=mask), memory_mask=mask, cache=batch.cache)


def _run_masked(model: Any, batch: CallInputs) -> Any:
    return model(batch.x, mask=_hidden(batch.keep), cache=batch.cache)


def _run_dual(model: Any, batch: CallInputs) -> Tensor:
    """The factors of the logits side by side: every text meets every picture in those, so that no row is its own."""
    texts = model.logit_scale.exp() * model.embed_texts(batch.x)
    return torch.cat((texts, model.embed_images(batch.source)), dim=-1)


def _room(config: Any) -> int | None:
    return config.max_len if isinstance(config.positions, LearnedPositions) else None


def _kept(mask: Mask, **how: Any) -> Caching | None:
    """A cache, where no layer looks ahead."""
    return None if not is_causal(mask, 1, 16) else Caching(new=KVCache, **how)


def _encoder(model: models.Encoder | models.Decoder) -> ModuleSpec:
    config = model.config
    mask = config.seen(config.mask)
    return ModuleSpec(
        model, inputs=Ids(config.vocab_size), run=_run_stack, mask=mask, layers=config.n_layers,
        layer_masks=config.layer_masks, positions=not isinstance(config.positions, NoPE), max_len=_room(config),
        takes_padding=not mask.depends_on_length, left_padding=is_translation_invariant(mask),
    )  # fmt: skip


def _decoder(model: models.Decoder) -> ModuleSpec | None:
    if model.config.cross_attention:
        return None  # it is half of a model: check the EncoderDecoder
    return replace(_encoder(model), caching=_kept(model.config.seen(model.config.mask)))


def _encoder_decoder(model: models.EncoderDecoder) -> ModuleSpec:
    config = model.config
    mask, source = config.seen(config.decoder_mask), config.seen(config.encoder_mask)
    reads, heard = config.n_features is None, config.n_features or 0  # a front of convolutions sees what masks hide
    return ModuleSpec(
        model, inputs=Ids(config.vocab_size),
        source=Ids(config.source_vocab_size or config.vocab_size) if reads else Embeddings(heard),
        run=_run_encoder_decoder, mask=mask, layers=config.n_decoder_layers, layer_masks=config.layer_masks,
        positions=not isinstance(config.positions, NoPE), max_len=_room(config), caching=_kept(mask),
        takes_padding=reads and not source.depends_on_length, left_padding=reads and is_translation_invariant(source),
        takes_target_padding=not mask.depends_on_length, left_target_padding=is_translation_invariant(mask),
    )  # fmt: skip


def _speech(model: models.CTCEncoder) -> ModuleSpec:
    """Concatenated frames are a token; its left frames count as one more layer."""
    config = model.config
    earlier = window(-(-config.left_frames // config.frame_stacking), 0)

    def run(model: Any, batch: CallInputs) -> Any:
        return model(batch.x.unflatten(-1, (-1, config.mel.n_mels)).flatten(1, 2), cache=batch.cache)

    return ModuleSpec(
        model, inputs=Embeddings(config.frame_stacking * config.mel.n_mels), run=run, mask=config.mask | earlier,
        layers=config.n_layers + 1, layer_masks=(earlier, *[config.mask] * config.n_layers), positions=True,
        caching=_kept(config.mask, truncate=None),
    )  # fmt: skip


def _dual(model: models.DualEncoder) -> ModuleSpec:
    text, image = model.config.text, model.config.image
    source = Values((image.n_channels, *image.image_size))
    return ModuleSpec(model, inputs=Ids(text.vocab_size), source=source, run=_run_dual, max_len=_room(text))


def _recurrent(model: models.Recurrent) -> ModuleSpec:
    read = ModuleSpec(model, inputs=Ids(model.config.vocab_size), run=_run_masked, positions=True, takes_padding=True)
    if not isinstance(model.config.task, NextToken):
        return read
    return replace(read, mask=causal(), caching=Caching(new=RecurrentCache, truncate=None))


def _recurrent_pair(model: models.RecurrentSeq2Seq) -> ModuleSpec:
    config = model.config
    return ModuleSpec(
        model, inputs=Ids(config.vocab_size), source=Ids(config.source_vocab_size or config.vocab_size),
        run=_run_recurrent_pair, mask=causal(), positions=True, takes_padding=True,
        caching=Caching(new=RecurrentCache, truncate=None),
    )  # fmt: skip


def _values(model: Any) -> ModuleSpec:
    config = model.config
    pictures = hasattr(config, "image_size")
    return ModuleSpec(
        model, inputs=Values((config.n_channels, *config.image_size) if pictures else (config.n_features,))
    )


def _attention(model: MultiHeadAttention) -> ModuleSpec:
    return ModuleSpec(
        model, inputs=Embeddings(model.q_proj.in_features), run=_run_masked, mask=full(), layers=1,
        positions=model.rotary is not None, takes_padding=True,
    )  # fmt: skip


def _block(model: Block) -> ModuleSpec | None:
    return _attention(model.attention) if getattr(model, "cross_attention", None) is None else None


_KNOWN: dict[type, Callable[[Any], ModuleSpec | None]] = {
    models.Encoder: _encoder,
    models.Decoder: _decoder,
    models.EncoderDecoder: _encoder_decoder,
    models.VisionTransformer: _values,
    models.CTCEncoder: _speech,
    models.DualEncoder: _dual,
    models.ConvNet: _values,
    models.Recurrent: _recurrent,
    models.RecurrentSeq2Seq: _recurrent_pair,
    models.LogisticRegression: _values,
    models.Autoencoder: _values,
    MultiHeadAttention: _attention,
    Block: _block,
}
