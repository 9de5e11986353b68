"""Specs that describe how the models of clearhead are called."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import models
from clearhead._core.call_types import Kwargs
from clearhead.analysis.inputs.module_spec import Caching, CallInputs, Embeddings, Ids, ModuleSpec, Values
from clearhead.masks import Mask, causal, full, padding, window
from clearhead.masks.operators import is_causal, is_translation_invariant
from clearhead.models.baselines.recurrent import NextToken, RecurrentCache
from clearhead.nn import Block, KVCache, MultiHeadAttention
from clearhead.nn.positions import LearnedPositions, NoPE


def infer_builtin(module: Callable[..., Any]) -> ModuleSpec | None:
    """Return the spec of a clearhead model, or None."""
    kind = getattr(module, "_orig_mod", module)  # the module wrapped by torch.compile
    for model_type, make in _SPECS.items():
        if isinstance(kind, model_type):
            spec = make(kind)
            return None if spec is None else replace(spec, module=module, name=model_type.__name__)
    return None


def _hidden(keep: Tensor | None) -> Mask | None:
    """Return `padding(…)` of rows whose real tokens are contiguous."""
    return None if keep is None else padding(keep.sum(1), left_pad=keep.int().argmax(1))


def _stack_extra(model: models.Encoder | models.AudioEncoder | models.Decoder, keep: Tensor | None) -> Kwargs:
    extra: Kwargs = {"mask": _hidden(keep)}
    if keep is not None and model.config.positions.kind == "added":
        extra["positions"] = (keep.long().cumsum(1) - 1).clamp(min=0)  # (B, T), from each row's first real token
    return extra


def _run_stack(model: models.Encoder | models.Decoder, batch: CallInputs) -> object:
    cache = {} if batch.cache is None else {"cache": batch.cache}
    return model(batch.x, **cache, **_stack_extra(model, batch.keep))


def _run_encoder_decoder(model: models.EncoderDecoder, batch: CallInputs) -> object:
    memory = model.encode(batch.required_source, **_stack_extra(model.encoder, batch.source_keep))
    masks = _stack_extra(model.decoder, batch.keep)
    return model.decode(batch.x, memory, memory_mask=_hidden(batch.source_keep), cache=batch.cache, **masks)


def _run_recurrent_pair(model: models.RecurrentSeq2Seq, batch: CallInputs) -> object:
    mask = _hidden(batch.source_keep)
    return model.decode(batch.x, model.encode(batch.required_source, mask=mask), memory_mask=mask, cache=batch.cache)


def _run_masked(model: nn.Module, batch: CallInputs) -> object:
    return model(batch.x, mask=_hidden(batch.keep), cache=batch.cache)


def _run_dual(model: models.DualEncoder, batch: CallInputs) -> Tensor:
    """Return the factors and the bias of the logits, because the logits themselves mix the rows of a batch."""
    texts = model.logit_scale.exp() * model.embed_texts(batch.x)
    parts = [texts, model.embed_images(batch.required_source)]
    if model.logit_bias is not None:
        parts.append(model.logit_bias.expand(len(texts), 1))
    return torch.cat(parts, dim=-1)


def _max_len(config: Any) -> int | None:
    return config.max_len if isinstance(config.positions, LearnedPositions) else None


def _caching(mask: Mask, **options: Any) -> Caching | None:
    """Return a cache if the mask is causal."""
    return None if not is_causal(mask, 1, 16) else Caching(new=KVCache, **options)


def _encoder(model: models.Encoder | models.Decoder) -> ModuleSpec:
    config = model.config
    mask = config.union_mask(config.mask)
    return ModuleSpec(
        model,
        inputs=Ids(config.vocab_size),
        run=_run_stack,
        mask=mask,
        layers=config.n_layers,
        layer_masks=config.layer_masks,
        positions=not isinstance(config.positions, NoPE),
        max_len=_max_len(config),
        takes_padding=not mask.depends_on_length,
        left_padding=is_translation_invariant(mask),
    )


def _decoder(model: models.Decoder) -> ModuleSpec | None:
    if model.config.cross_attention:
        return None  # a part of a model: check the EncoderDecoder
    return replace(_encoder(model), caching=_caching(model.config.union_mask(model.config.mask)))


def _encoder_decoder(model: models.EncoderDecoder) -> ModuleSpec:
    config = model.config
    mask = config.union_mask(config.decoder_mask)
    source = config.union_mask(config.encoder_mask)
    takes_text = config.n_features is None  # convolutions ignore masks
    return ModuleSpec(
        model,
        inputs=Ids(config.vocab_size),
        source=Ids(config.source_vocab_size or config.vocab_size) if takes_text else Embeddings(config.n_features or 0),
        run=_run_encoder_decoder,
        mask=mask,
        layers=config.n_decoder_layers,
        layer_masks=config.layer_masks,
        positions=not isinstance(config.positions, NoPE),
        max_len=_max_len(config),
        caching=_caching(mask),
        takes_padding=takes_text and not source.depends_on_length,
        left_padding=takes_text and is_translation_invariant(source),
        takes_target_padding=not mask.depends_on_length,
        left_target_padding=is_translation_invariant(mask),
    )


def _speech(model: models.CTCEncoder) -> ModuleSpec:
    """Return a spec in which stacked frames are one token and the left frames count as one more layer."""
    config = model.config
    left_context = window(-(-config.left_frames // config.frame_stacking), 0)

    def run(model: models.CTCEncoder, batch: CallInputs) -> object:
        return model(batch.x.unflatten(-1, (-1, config.mel.n_mels)).flatten(1, 2), cache=batch.cache)

    return ModuleSpec(
        model,
        inputs=Embeddings(config.frame_stacking * config.mel.n_mels),
        run=run,
        mask=config.mask | left_context,
        layers=config.n_layers + 1,
        layer_masks=(left_context, *[config.mask] * config.n_layers),
        positions=True,
        caching=_caching(config.mask, truncate=None),
    )


def _dual(model: models.DualEncoder) -> ModuleSpec:
    text, image = model.config.text, model.config.image
    source = Values((image.n_channels, *image.image_size))
    return ModuleSpec(model, inputs=Ids(text.vocab_size), source=source, run=_run_dual, max_len=_max_len(text))


def _recurrent(model: models.Recurrent) -> ModuleSpec:
    spec = ModuleSpec(model, inputs=Ids(model.config.vocab_size), run=_run_masked, positions=True, takes_padding=True)
    if not isinstance(model.config.task, NextToken):
        return spec
    return replace(spec, mask=causal(), caching=Caching(new=RecurrentCache, truncate=None))


def _recurrent_pair(model: models.RecurrentSeq2Seq) -> ModuleSpec:
    config = model.config
    return ModuleSpec(
        model,
        inputs=Ids(config.vocab_size),
        source=Ids(config.source_vocab_size or config.vocab_size),
        run=_run_recurrent_pair,
        mask=causal(),
        positions=True,
        takes_padding=True,
        caching=Caching(new=RecurrentCache, truncate=None),
    )


def _values(model: Any) -> ModuleSpec:
    config = model.config
    is_image = hasattr(config, "image_size")
    return ModuleSpec(
        model, inputs=Values((config.n_channels, *config.image_size) if is_image else (config.n_features,))
    )


def _waveform(model: models.WaveformEncoder) -> ModuleSpec:
    """Return the spec of waveforms of eight encoder frames: other lengths are other inputs, not prefixes."""
    stem = model.embedding
    hop = math.prod(model.config.conv_strides)
    return ModuleSpec(model, inputs=Values((stem.min_samples + 7 * hop,)))


def _attention(model: MultiHeadAttention) -> ModuleSpec:
    return ModuleSpec(
        model,
        inputs=Embeddings(model.q_proj.in_features),
        run=_run_masked,
        mask=full(),
        layers=1,
        positions=model.rotary is not None,
        takes_padding=True,
    )


def _block(model: Block) -> ModuleSpec | None:
    return _attention(model.attention) if getattr(model, "cross_attention", None) is None else None


_SPECS: dict[type, Callable[[Any], ModuleSpec | None]] = {
    models.Encoder: _encoder,
    models.Decoder: _decoder,
    models.EncoderDecoder: _encoder_decoder,
    models.VisionTransformer: _values,
    models.CTCEncoder: _speech,
    models.WaveformEncoder: _waveform,
    models.DualEncoder: _dual,
    models.ConvNet: _values,
    models.Recurrent: _recurrent,
    models.RecurrentSeq2Seq: _recurrent_pair,
    models.LogisticRegression: _values,
    models.Autoencoder: _values,
    MultiHeadAttention: _attention,
    Block: _block,
}
