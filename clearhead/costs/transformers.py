"""The Transformers, read from their configurations: which ops a forward pass of each runs, in which order.

The walk mirrors `Stack`, `Block` and the models above them line by line, including where Python holds on to a
tensor: a caller's variable keeps its tensor until the call returns.

    B batch   T tokens (targets)   S tokens attended to (sources)   M model width   V vocabulary   L layers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clearhead.costs.amounts import ZERO, Amount, exact_ratio
from clearhead.costs.attention import Heads, Pairs, Sight, attention, pairs_of
from clearhead.costs.layers import (
    Setting,
    Shape,
    add,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    feed_forward,
    linear,
    norm,
    squares,
)
from clearhead.costs.program import Kernel, Made, Op
from clearhead.layers.residual import PreNorm
from clearhead.masks import Causal, Full, Mask
from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoderConfig, VisionConfig
from clearhead.models.stack import TextConfig, TransformerConfig, both
from clearhead.positions import ALiBi, Learned, Positions, RelativeBias, Rotary

__all__ = ["Sizes", "decoder", "encoder", "encoder_decoder", "heads_of", "vision"]

_ID = 8


@dataclass(frozen=True)
class Sizes:
    """The letters of one stack."""

    heads: Heads
    F: Amount
    L: Amount
    T: Amount


def heads_of(s: Setting, config: TransformerConfig, rotary: Rotary | None = None) -> Heads:
    """The attention sizes of a configuration: letters where a size is free, expressions where it follows
    from others."""
    M, H = s.letter("M", config.d_model), s.letter("H", config.n_heads)
    K = H if config.n_kv_heads is None else s.letter("K", config.n_kv_heads)
    D = exact_ratio(M, H) if config.d_head is None else s.letter("D", config.d_head)
    return Heads(M, H, K, D, config.biases.q, config.attention_dropout, rotary)


def _sizes(s: Setting, config: TransformerConfig, positions: Positions, layers: tuple[str, int], T: Amount) -> Sizes:
    heads = heads_of(s, config, positions if isinstance(positions, Rotary) else None)
    F = 4 * heads.M if config.d_ff is None else s.letter("F", config.d_ff)
    return Sizes(heads, F, s.letter(*layers), T)


# ---------------------------------------------------------------------- the stack


def _place(s: Setting, config: TransformerConfig, positions: Positions, sizes: Sizes, x: str, tag: str) -> None:
    """Positions, the norm before the first block and dropout: from `x` to "placed"."""
    M, rows = sizes.heads.M, s.B * sizes.T
    name = x
    if positions.kind == "added":
        table: tuple[str, ...] = ()
        if isinstance(positions, Learned):
            table = (s.program.parameter(f"{tag}positions.weight", "positions", s.letter("N", positions.length) * M),)
        y = s.tensor("positioned", rows * M)
        s.program.add(
            Op(
                "positions",
                "positions",
                (name,),
                (y,),
                forward=(Kernel(y.n_bytes * 2 + sizes.T * M * s.itemsize),),
                backward=(Kernel(y.n_bytes),) if table else (),
                passes=(name,),
                parameters=table,
            )
        )
        name = "positioned"
    if isinstance(config, TextConfig) and config.embedding_norm:
        norm(s, config.norm, f"{tag}embedding_norm", name, "normed", rows, M)
        name = "normed"
    name = dropout(s, "embedding", name, "first", rows * M, config.dropout)
    s.program.alias("placed", name)
    s.program.drop(x, "positioned", "normed", "first")


def _run(
    s: Setting,
    config: TransformerConfig,
    positions: Positions,
    sizes: Sizes,
    tag: str,
    own: Pairs,
    dense_mask: bool,
    cross: Sight | None = None,
    *,
    writes: bool = False,
) -> str:
    """All blocks and the last norm: from "placed" to the name that is returned."""
    heads, rows = sizes.heads, s.B * sizes.T
    learned = isinstance(positions, RelativeBias)
    has_bias = positions.kind == "bias"
    if has_bias:
        _bias(s, positions, sizes, tag)
    sight = Sight(sizes.T, sizes.T, own, dense_mask, has_bias, learned, writes)
    s.program.alias("x", "placed")
    with s.program.repeated(sizes.L):
        s.program.alias("stream", "x")  # the stack's own variable holds x while the block runs
        _residual(
            s,
            config,
            tag,
            "norm1",
            rows,
            sizes,
            lambda h: attention(s, f"{tag}attention", tag, h, heads, sight),
        )
        if cross is not None:
            plain = Heads(heads.M, heads.H, heads.K, heads.D, heads.bias, heads.dropout)
            _residual(
                s,
                config,
                tag,
                "norm_cross",
                rows,
                sizes,
                lambda h: attention(s, f"{tag}cross_attention", f"{tag}cross ", h, plain, cross, "memory"),
            )
        _residual(s, config, tag, "norm2", rows, sizes, lambda h: _fed(s, config, tag, h, sizes))
        s.program.alias("x", "stream")
        s.program.drop("stream")
    s.program.drop("bias")
    if isinstance(config.residual, PreNorm):
        norm(s, config.norm, f"{tag}norm", "x", "normalised x", rows, heads.M)
        s.program.alias("result", "normalised x")
    else:
        s.program.alias("result", "x")
    s.program.drop("x", "normalised x", "placed")
    return "result"


def _fed(s: Setting, config: TransformerConfig, tag: str, h: str, sizes: Sizes) -> str:
    shape = Shape(s.B * sizes.T, sizes.heads.M, sizes.F)
    return feed_forward(
        s,
        f"{tag}feed_forward",
        config.activation,
        h,
        shape,
        bias=config.biases.ff,
        rate=config.feed_forward_dropout,
        part=f"{tag}feed-forward",
    )


def _residual(
    s: Setting,
    config: TransformerConfig,
    tag: str,
    name: str,
    rows: Amount,
    sizes: Sizes,
    branch: Callable[[str], str],
) -> None:
    """One residual line of `Block`: "stream" becomes what the branch makes of it."""
    p, M = s.program, sizes.heads.M
    part = f"{tag}residual"
    if isinstance(config.residual, PreNorm):
        norm(s, config.norm, f"{tag}{name}", "stream", "h", rows, M, f"{tag}norms")
        made = branch("h")
        last = dropout(s, part, made, "dropped", rows * M, config.dropout)
        p.drop("h", *((made,) if last != made else ()))
        add(s, part, "stream", last, "sum", rows * M)
        p.alias("stream", "sum")
    else:
        made = branch("stream")
        last = dropout(s, part, made, "dropped", rows * M, config.dropout)
        p.drop(*((made,) if last != made else ()))
        add(s, part, "stream", last, "sum", rows * M)
        p.drop(last)
        norm(s, config.norm, f"{tag}{name}", "sum", "normed sum", rows, M, f"{tag}norms")
        p.alias("stream", "normed sum")
    p.drop("sum", "normed sum", last)


def _bias(s: Setting, positions: Positions, sizes: Sizes, tag: str) -> None:
    """The (H, T, S) bias that every block of the stack adds to its scores."""
    own: tuple[str, ...] = ()
    looked_up: tuple[Made, ...] = ()
    if isinstance(positions, RelativeBias):
        elements = s.letter("N", positions.n_buckets) * sizes.heads.H
        own = (s.program.parameter(f"{tag}positions.weight", "positions", elements),)
        # The bucket of each distance, and the distance of each pair: the table's gradient is found by them.
        looked_up = (Made("buckets", sizes.T * (2 * _ID)), Made("distances", sizes.T * sizes.T * _ID))
    itemsize = 4 if isinstance(positions, ALiBi) else s.itemsize
    made = Made("bias", sizes.heads.H * sizes.T * sizes.T * itemsize)
    kernels = (Kernel(made.n_bytes),)
    s.program.add(Op("bias", "positions", (), (made,), forward=kernels, notes=looked_up, parameters=own))


def _needs_tensor(mask: Mask | None) -> bool:
    """Whether the kernel gets the mask as a tensor: anything but nothing and plain causal."""
    return mask is not None and not isinstance(mask, (Full, Causal))


# ---------------------------------------------------------------------- models


def encoder(s: Setting, config: EncoderConfig, tokens: int, mask: Mask | None) -> Pairs:
    """Ids in, vectors out; in training the loss is the mean of their squares."""
    T = s.letter("T", tokens)
    V = s.letter("V", config.vocab_size)
    s.program.inputs.append(Made("ids", s.B * T * _ID))
    seen = both(config.mask, mask)
    sizes = _sizes(s, config, config.positions, ("L", config.n_layers), T)
    pairs = pairs_of(s, seen, sizes.heads, T, T)
    _read(s, config, sizes, V, seen, pairs, "")
    if s.training:
        squares(s, "result", s.B * T * s.letter("M", config.d_model))
    return pairs


def _read(
    s: Setting, config: EncoderConfig, sizes: Sizes, V: Amount, seen: Mask | None, pairs: Pairs, tag: str
) -> None:
    embedding(s, "embedding", "ids", "embedded", s.B * sizes.T, V, sizes.heads.M, scaled=config.scaled_embedding)
    _place(s, config, config.positions, sizes, "embedded", tag)
    _run(s, config, config.positions, sizes, tag, pairs, _needs_tensor(seen))


def decoder(s: Setting, config: DecoderConfig, tokens: int, mask: Mask | None, source: int | None = None) -> Pairs:
    """Ids in, logits out; with cross-attention the memory is an input of `source` tokens."""
    T = s.letter("T", tokens)
    s.program.inputs.append(Made("ids", s.B * T * _ID))
    S = None
    if config.cross_attention:
        S = s.letter("S", tokens if source is None else source)
        memory = s.tensor("memory", s.B * S * s.letter("M", config.d_model))
        s.program.inputs.append(memory)
        s.program.with_gradient.add("memory")
    return _write(s, config, T, S, mask, ("L", config.n_layers), "")


def _write(
    s: Setting,
    config: DecoderConfig,
    T: Amount,
    S: Amount | None,
    mask: Mask | None,
    layers: tuple[str, int],
    tag: str,
    *,
    shared: bool = False,
) -> Pairs:
    sizes = _sizes(s, config, config.positions, layers, T)
    M, V = sizes.heads.M, s.letter("V", config.vocab_size)
    seen = both(config.mask, mask)
    pairs = pairs_of(s, seen, sizes.heads, T, T)
    table = "embedding" if shared or not tag else "decoder embedding"
    embedding(s, table, "ids", "embedded", s.B * T, V, M, scaled=config.scaled_embedding)
    _place(s, config, config.positions, sizes, "embedded", tag)
    cross = None
    if S is not None:
        dense = s.B * (T * S)
        cross = Sight(T, S, Pairs(dense, dense, dense), writes=True)
    _run(s, config, config.positions, sizes, tag, pairs, _needs_tensor(seen), cross, writes=True)
    shape = Shape(s.B * T, M, V)
    linear(
        s,
        "logits",
        "logits",
        "result",
        "logits",
        shape,
        bias=False,
        weight=f"{table}.weight" if config.tied else None,
    )
    s.program.drop("result")
    if s.training:
        s.program.inputs.append(Made("targets", s.B * T * _ID))
        cross_entropy(s, "logits", s.B * T, V)
    return pairs


def encoder_decoder(s: Setting, config: EncoderDecoderConfig, source: int, target: int, mask: Mask | None) -> Pairs:
    """Source and target ids in, logits of the target out. `mask` is added to the decoder's own."""
    reading = config.encoder
    S, T = s.letter("S", source), s.letter("T", target)
    s.program.inputs += [Made("source ids", s.B * S * _ID), Made("ids", s.B * T * _ID)]
    V = s.letter("V", config.vocab_size)
    source_V = V if reading.vocab_size == config.vocab_size else s.letter("V_s", reading.vocab_size)
    seen = both(reading.mask, None)
    sizes = _sizes(s, reading, reading.positions, ("L_e", reading.n_layers), S)
    read = pairs_of(s, seen, sizes.heads, S, S, letter="P_e")
    _read(s, reading, sizes, source_V, seen, read, "encoder ")
    s.program.alias("memory", "result")
    s.program.drop("result")
    layers = ("L_d", config.n_decoder_layers)
    pairs = _write(s, config.decoder, T, S, mask, layers, "decoder ", shared=config.share_embeddings)
    s.program.drop("memory")
    return pairs


def vision(s: Setting, config: VisionConfig) -> Pairs:
    """Images in, class logits out. The number of tokens follows from the image."""
    rows, columns = config.grid
    N = s.letter("N_p", rows * columns)
    extra = config.pooling.n_extra
    T = N + extra if extra else N
    sizes = _sizes(s, config, config.chosen_positions, ("L", config.n_layers), T)
    M, p = sizes.heads.M, s.program
    pixels = s.letter("C", config.n_channels) * s.letter("p", config.patch_size) * s.letter("p", config.patch_size)
    images = s.tensor("images", s.B * N * pixels)
    p.inputs.append(images)
    elementwise(s, "cut", "embedding", ("images",), s.tensor("patches", s.B * N * pixels))
    linear(
        s,
        "embedding.projection",
        "embedding",
        "patches",
        "embedded",
        Shape(s.B * N, pixels, M),
        input_gradient=False,
    )
    p.drop("patches")
    if extra:
        own = (p.parameter("cls", "embedding", M * extra),)
        y = s.tensor("tokens", s.B * T * M)
        p.add(
            Op(
                "cls",
                "embedding",
                ("embedded",),
                (y,),
                forward=(Kernel(y.n_bytes * 2),),
                passes=("embedded",),
                parameters=own,
            )
        )
        p.alias("embedded", "tokens")
        p.drop("tokens")
    _place(s, config, config.chosen_positions, sizes, "embedded", "")
    pairs = pairs_of(s, None, sizes.heads, T, T)
    _run(s, config, config.chosen_positions, sizes, "", pairs, False)
    _classify(s, config, sizes)
    return pairs


def _classify(s: Setting, config: VisionConfig, sizes: Sizes) -> None:
    """Pool the tokens into one vector; the linear head gives the logits."""
    M, C = sizes.heads.M, s.letter("n_c", config.n_classes)
    tokens = s.B * sizes.T * M * s.itemsize
    is_view = config.pooling.n_extra > 0  # one token of the stream, without a copy: the whole stream is kept for it
    pooled = s.tensor("pooled", ZERO if is_view else s.B * M)
    s.program.add(
        Op(
            "pool",
            "logits",
            ("result",),
            (pooled,),
            forward=() if is_view else (Kernel(tokens),),
            backward=(Kernel(tokens),),
            keeps=("result",) if is_view else (),
        )
    )
    linear(s, "head", "logits", "pooled", "logits", Shape(s.B, M, C))
    s.program.drop("result", "pooled")
    if s.training:
        s.program.inputs.append(Made("targets", s.B * _ID))
        cross_entropy(s, "logits", s.B, C)
