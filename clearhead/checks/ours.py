"""How the models of this project are called."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead.attention import KVCache, MultiHeadAttention
from clearhead.checks.subject import Batch, Caching, Embeddings, Ids, Run, Subject, Values
from clearhead.generation.patterns import looks_ahead, speaks_of_distance_only
from clearhead.layers import Block
from clearhead.masks import Mask, causal, full, padding
from clearhead.models.autoencoder import Autoencoder
from clearhead.models.convnet import ConvNet
from clearhead.models.decoder import Decoder
from clearhead.models.encoder import Encoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.linear import LogisticRegression
from clearhead.models.recurrent import NextToken, Recurrent, RecurrentCache
from clearhead.models.recurrent_seq2seq import RecurrentSeq2Seq
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


def _run_encoder(model: Any, batch: Batch) -> Tensor:
    out: Tensor = model(batch.x, **_stack_extra(model, batch.keep))
    return out


def _run_decoder(model: Any, batch: Batch) -> Tensor:
    out: Tensor = model(batch.x, cache=batch.cache, **_stack_extra(model, batch.keep))
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


def _stack(module: Any, kind: Any, run: Run, mask: Mask, *, layers: int, **more: Any) -> Subject:
    """What the three Transformers over tokens share; padding is told by the mask that sees it."""
    config = kind.config
    told = {"pads": not mask.depends_on_length, "left": speaks_of_distance_only(mask)}
    return Subject(
        module,
        name=type(kind).__name__,
        inputs=Ids(config.vocab_size),
        run=run,
        sees=mask,
        layers=layers,
        in_turn=config.layer_masks,
        positions=not isinstance(config.positions, NoPositions),
        max_len=config.max_len if isinstance(config.positions, Learned) else None,
        **told | more,
    )


def _caching(mask: Mask) -> Caching | None:
    return None if looks_ahead(mask, 1, 16) else Caching(new=KVCache)


def _encoder(module: Any, kind: Encoder) -> Subject:
    config = kind.config
    return _stack(module, kind, _run_encoder, config.seen(config.mask), layers=config.n_layers)


def _decoder(module: Any, kind: Decoder) -> Subject | None:
    config = kind.config
    if config.cross_attention:
        return None  # it is half of a model: check the EncoderDecoder
    mask = config.seen(config.mask)
    return _stack(module, kind, _run_decoder, mask, layers=config.n_layers, caching=_caching(mask))


def _encoder_decoder(module: Any, kind: EncoderDecoder) -> Subject:
    config = kind.config
    mask, source = config.seen(config.decoder_mask), config.seen(config.encoder_mask)
    more = {
        "source": Ids(config.source_vocab_size or config.vocab_size),
        "pads": not source.depends_on_length,
        "left": speaks_of_distance_only(source),
        "pads_target": not mask.depends_on_length,
        "left_target": speaks_of_distance_only(mask),
        "caching": _caching(mask),
    }
    return _stack(module, kind, _run_encoder_decoder, mask, layers=config.n_decoder_layers, **more)


def _pictures(module: Any, kind: VisionTransformer | ConvNet) -> Subject:
    shape = (kind.config.n_channels, *kind.config.image_size)
    return Subject(module, name=type(kind).__name__, inputs=Values(shape), run=_run_plain)


def _recurrent(module: Any, kind: Any) -> Subject:
    config, pair = kind.config, isinstance(kind, RecurrentSeq2Seq)
    says_next = pair or isinstance(config.task, NextToken)
    return Subject(
        module,
        name=type(kind).__name__,
        inputs=Ids(config.vocab_size),
        source=Ids(config.source_vocab_size or config.vocab_size) if pair else None,
        run=_run_recurrent_pair if pair else _run_recurrent,
        sees=causal() if says_next else None,
        positions=True,
        pads=True,
        caching=Caching(new=RecurrentCache, truncate=None) if says_next else None,
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
    found = _attention(module, kind.attention)
    return Subject(**{**vars(found), "name": "Block"})


_KNOWN: tuple[tuple[type, Any], ...] = (
    (Encoder, _encoder),
    (Decoder, _decoder),
    (EncoderDecoder, _encoder_decoder),
    (VisionTransformer, _pictures),
    (ConvNet, _pictures),
    (Recurrent, _recurrent),
    (RecurrentSeq2Seq, _recurrent),
    (LogisticRegression, _features),
    (Autoencoder, _features),
    (MultiHeadAttention, _attention),
    (Block, _block),
)

__all__ = ["guess"]
