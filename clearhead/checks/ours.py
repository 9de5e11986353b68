"""How the models of this project are called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.attention import KVCache, MultiHeadAttention
from clearhead.checks.subject import Batch, Caching, Embeddings, Ids, Subject, Values
from clearhead.generation.patterns import looks_ahead, speaks_of_distance_only
from clearhead.layers import Block
from clearhead.masks import Mask, causal, full, padding, window
from clearhead.models.autoencoder import Autoencoder
from clearhead.models.convnet import ConvNet
from clearhead.models.decoder import Decoder
from clearhead.models.dual_encoder import DualEncoder
from clearhead.models.encoder import Encoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.linear import LogisticRegression
from clearhead.models.recurrent import NextToken, Recurrent, RecurrentCache
from clearhead.models.recurrent_seq2seq import RecurrentSeq2Seq
from clearhead.models.speech import SpeechEncoder
from clearhead.models.vision import VisionTransformer
from clearhead.positions import Learned, NoPositions


def guess(module: Any) -> Subject | None:
    """The subject of a model of this project; None for anything else."""
    kind = getattr(module, "_orig_mod", module)  # what torch.compile wraps
    for known, make in _KNOWN:
        if isinstance(kind, known):
            return make(module, kind)
    return None


def _hidden(keep: Tensor | None) -> Mask | None:
    """`padding(…)` for rows whose real tokens are one run."""
    if keep is None:
        return None
    return padding(keep.sum(1), before=keep.int().argmax(1))


def _from_first(keep: Tensor) -> Tensor:
    """(B, T): positions counted from each row's first real token."""
    return (keep.long().cumsum(1) - 1).clamp(min=0)


def _stack_extra(model: Any, keep: Tensor | None) -> dict[str, Any]:
    extra: dict[str, Any] = {"mask": _hidden(keep)}
    if keep is not None and model.config.positions.kind == "added":
        extra["positions"] = _from_first(keep)
    return extra


def _run_stack(model: Any, batch: Batch) -> Tensor:
    cache = {} if batch.cache is None else {"cache": batch.cache}
    out: Tensor = model(batch.x, **cache, **_stack_extra(model, batch.keep))
    return out


def _run_encoder_decoder(model: Any, batch: Batch) -> Tensor:
    mask = _hidden(batch.source_keep)
    extra = _stack_extra(model.encoder, batch.source_keep)
    memory = model.encode(batch.source, **extra)
    told = _stack_extra(model.decoder, batch.keep)
    out: Tensor = model.decode(batch.x, memory, memory_mask=mask, cache=batch.cache, **told)
    return out


def _run_recurrent(model: Any, batch: Batch) -> Tensor:
    out: Tensor = model(batch.x, mask=_hidden(batch.keep), cache=batch.cache)
    return out


def _run_recurrent_pair(model: Any, batch: Batch) -> Tensor:
    mask = _hidden(batch.source_keep)
    memory = model.encode(batch.source, mask=mask)
    out: Tensor = model.decode(batch.x, memory, memory_mask=mask, cache=batch.cache)
    return out


def _run_plain(model: Any, batch: Batch) -> Any:
    return model(batch.x)


def _run_masked(model: Any, batch: Batch) -> Any:
    return model(batch.x, mask=_hidden(batch.keep))


def _run_dual(model: Any, batch: Batch) -> Tensor:
    """The factors of the logits side by side: every text meets every picture in those, so that no row is its own."""
    texts = model.logit_scale.exp() * model.embed_texts(batch.x)
    return torch.cat((texts, model.embed_images(batch.source)), dim=-1)


def _room(config: Any) -> int | None:
    return config.max_len if isinstance(config.positions, Learned) else None


def _encoder(module: Any, kind: Encoder | Decoder) -> Subject:
    config = kind.config
    mask = config.seen(config.mask)
    return Subject(
        module=module,
        name="Encoder",
        inputs=Ids(config.vocab_size),
        run=_run_stack,
        sees=mask,
        layers=config.n_layers,
        in_turn=config.layer_masks,
        positions=not isinstance(config.positions, NoPositions),
        pads=not mask.depends_on_length,
        left=speaks_of_distance_only(mask),
        max_len=_room(config),
    )


def _decoder(module: Any, kind: Decoder) -> Subject | None:
    if kind.config.cross_attention:
        return None  # it is half of a model: check the EncoderDecoder
    read = _encoder(module, kind)
    ahead = looks_ahead(kind.config.seen(kind.config.mask), 1, 16)
    return replace(read, name="Decoder", caching=None if ahead else Caching(new=KVCache))


def _encoder_decoder(module: Any, kind: EncoderDecoder) -> Subject:
    config = kind.config
    mask, source = config.seen(config.decoder_mask), config.seen(config.encoder_mask)
    ahead = looks_ahead(mask, 1, 16)
    return Subject(
        module=module,
        name="EncoderDecoder",
        inputs=Ids(config.vocab_size),
        source=Ids(config.source_vocab_size or config.vocab_size),
        run=_run_encoder_decoder,
        sees=mask,
        layers=config.n_decoder_layers,
        in_turn=config.layer_masks,
        positions=not isinstance(config.positions, NoPositions),
        pads=not source.depends_on_length,
        left=speaks_of_distance_only(source),
        pads_target=not mask.depends_on_length,
        left_target=speaks_of_distance_only(mask),
        caching=None if ahead else Caching(new=KVCache),
        max_len=_room(config),
    )


def _pictures(module: Any, kind: VisionTransformer | ConvNet) -> Subject:
    shape = (kind.config.n_channels, *kind.config.image_size)
    return Subject(module=module, name=type(kind).__name__, inputs=Values(shape), run=_run_plain)


def _run_speech(model: Any, batch: Batch) -> Any:
    n_mels = model.config.mel.n_mels
    return model(batch.x.unflatten(-1, (-1, n_mels)).flatten(1, 2), cache=batch.cache)


def _speech(module: Any, kind: SpeechEncoder) -> Subject:
    """A moment's frames, side by side, are its token; that it is made of earlier ones, too, is a layer more."""
    config = kind.config
    earlier = window(-(-config.n_earlier // config.n_stacked), 0)
    return Subject(
        module=module,
        name="SpeechEncoder",
        inputs=Embeddings(config.n_stacked * config.mel.n_mels),
        run=_run_speech,
        sees=config.mask | earlier,
        layers=config.n_layers + 1,
        in_turn=(earlier, *[config.mask] * config.n_layers),
        positions=True,
        caching=None if looks_ahead(config.mask, 1, 16) else Caching(new=KVCache, truncate=None),
    )


def _dual(module: Any, kind: DualEncoder) -> Subject:
    text, image = kind.config.text, kind.config.image
    reads: dict[str, Any] = {"inputs": Ids(text.vocab_size), "source": Values((image.n_channels, *image.image_size))}
    return Subject(module=module, name="DualEncoder", run=_run_dual, **reads, max_len=_room(text))


def _recurrent(module: Any, kind: Recurrent) -> Subject:
    config = kind.config
    says_next = isinstance(config.task, NextToken)
    return Subject(
        module=module,
        name="Recurrent",
        inputs=Ids(config.vocab_size),
        run=_run_recurrent,
        sees=causal() if says_next else None,
        positions=True,
        pads=True,
        caching=Caching(new=RecurrentCache, truncate=None) if says_next else None,
    )


def _recurrent_pair(module: Any, kind: RecurrentSeq2Seq) -> Subject:
    config = kind.config
    return Subject(
        module=module,
        name="RecurrentSeq2Seq",
        inputs=Ids(config.vocab_size),
        source=Ids(config.source_vocab_size or config.vocab_size),
        run=_run_recurrent_pair,
        sees=causal(),
        positions=True,
        pads=True,
        caching=Caching(new=RecurrentCache, truncate=None),
    )


def _features(module: Any, kind: LogisticRegression | Autoencoder) -> Subject:
    width = kind.config.n_features
    return Subject(module=module, name=type(kind).__name__, inputs=Values((width,)), run=_run_plain)


def _attention(module: Any, kind: MultiHeadAttention) -> Subject:
    return Subject(
        module=module,
        name="MultiHeadAttention",
        inputs=Embeddings(kind.q_proj.in_features),
        run=_run_masked,
        sees=full(),
        layers=1,
        positions=kind.rotary is not None,
        pads=True,
    )


def _block(module: Any, kind: Block) -> Subject | None:
    if getattr(kind, "cross_attention", None) is not None:
        return None
    return replace(_attention(module, kind.attention), name="Block")


_KNOWN: tuple[tuple[type, Any], ...] = (
    (Encoder, _encoder),
    (Decoder, _decoder),
    (EncoderDecoder, _encoder_decoder),
    (VisionTransformer, _pictures),
    (SpeechEncoder, _speech),
    (DualEncoder, _dual),
    (ConvNet, _pictures),
    (Recurrent, _recurrent),
    (RecurrentSeq2Seq, _recurrent_pair),
    (LogisticRegression, _features),
    (Autoencoder, _features),
    (MultiHeadAttention, _attention),
    (Block, _block),
)

__all__ = ["guess"]
