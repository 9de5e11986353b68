"""`cost`: from a configuration (or a model, or the sizes of one attention layer) to a prediction, without building
anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from clearhead.attention import MultiHeadAttention, ScaledDot
from clearhead.attention.scores import Dot
from clearhead.attention.weights import Softmax
from clearhead.costs import baselines, transformers
from clearhead.costs.amounts import exact_ratio, size, total
from clearhead.costs.attention import Heads, Pairs, Sight, attention, pairs_of
from clearhead.costs.layers import Setting, squares
from clearhead.costs.ledger import balance
from clearhead.costs.program import Program
from clearhead.costs.result import Cost, memory_of, parts_of
from clearhead.errors import ConfigError, DtypeError, ImplementationError, ShapeError
from clearhead.masks import Causal, Full, Mask, as_mask
from clearhead.models import PRESETS, Config, DecoderConfig, EncoderConfig, EncoderDecoderConfig, VisionConfig
from clearhead.models.autoencoder import AutoencoderConfig
from clearhead.models.convnet import ConvNetConfig
from clearhead.models.linear import LogisticRegressionConfig
from clearhead.models.recurrent import RecurrentConfig
from clearhead.models.recurrent_seq2seq import RecurrentSeq2SeqConfig
from clearhead.positions import Learned
from clearhead.values import did_you_mean

__all__ = ["AttentionSizes", "cost", "cost_of", "preset", "setting"]

_IMPLEMENTATIONS = ("auto", "fused", "gathered", "reference")


class AttentionSizes:
    """One multi-head attention layer by its sizes alone, as `MultiHeadAttention` takes them."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        bias: bool = True,
    ) -> None:
        with torch.device("meta"):  # its own checks, without its memory
            layer = MultiHeadAttention(d_model, n_heads, n_kv_heads=n_kv_heads, d_head=d_head, bias=bias)
        self.d_model, self.n_heads, self.bias = d_model, n_heads, bias
        self.n_kv_heads = None if layer.n_kv_heads == n_heads else layer.n_kv_heads
        self.d_head = None if layer.d_head * n_heads == d_model else layer.d_head
        self.dropout = 0.0
        self.rotary = None


def preset(name: str) -> Config:
    """The configuration of a preset; an unknown name is answered with the nearest one."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; {did_you_mean(name, PRESETS)}")
    return PRESETS[name]()


def cost(
    subject: Config | nn.Module | AttentionSizes | str,
    *,
    tokens: int | tuple[int, int] | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    mask: Mask | None = None,
    impl: str = "auto",
    device: torch.device | str = "cuda",
) -> Cost:
    """What a model (or one attention layer) costs: parameters, operations, bytes moved and memory, with formulas.

    `subject` is a configuration, a model, a `MultiHeadAttention`, or the name of a preset. `tokens` is the length;
    (source, target) where a model reads one sequence and writes another (one number: both). Models whose input has
    a fixed size, such as images, need none. `mask` is added to the model's own; attention is charged for the pairs
    that `impl` computes, and `pairs` also says how many are allowed. `training` is one step: forward with dropout,
    backward, AdamW, all in `dtype`. `device` ("cuda" or "cpu") decides which kernels torch would run. Nothing is
    built and nothing is run.
    """
    _check_sizes(batch=batch)
    _check_choices(dtype, impl)
    config = _config_of(subject)
    s = setting(batch, dtype, training=training, device=device, impl=impl)
    pairs = _write(s, config, tokens, None if mask is None else as_mask(mask))
    return cost_of(subject if isinstance(subject, str) else _label(config), s, dtype, pairs)


def cost_of(subject: str, s: Setting, dtype: torch.dtype, pairs: Pairs | None = None) -> Cost:
    """The prediction for a program that has been written."""
    program = s.program
    parts = parts_of(program)
    found = balance(program, training=s.training)
    return Cost(
        subject=subject,
        batch=s.B.value,
        dtype=dtype,
        training=s.training,
        impl=s.impl,
        device=s.device,
        sizes=dict(program.sizes),
        parts=parts,
        items=parts_of(program, by_item=True),
        parameters=program.parameters,
        forward=total(part.forward for part in parts),
        backward=total(part.backward for part in parts),
        traffic=total(part.traffic for part in parts),
        memory=memory_of(program, found, training=s.training),
        pairs=pairs,
        program=program,
        joined=found.joined,
    )


def setting(
    batch: int,
    dtype: torch.dtype,
    *,
    training: bool = False,
    device: torch.device | str = "cuda",
    impl: str = "auto",
) -> Setting:
    """An empty program to write into, and what its layers need to know."""
    program = Program(itemsize=dtype.itemsize)
    program.sizes["B"] = batch
    return Setting(program, size("B", batch), dtype, training, torch.device(device).type, impl)


def _label(config: Config | AttentionSizes | MultiHeadAttention) -> str:
    return "MultiHeadAttention" if not isinstance(config, Config) else type(config).__name__.removesuffix("Config")


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
        if value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")


def _check_choices(dtype: torch.dtype, impl: str) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise DtypeError(f"dtype is {dtype}; expected a floating-point dtype such as torch.float32 or torch.bfloat16")
    if impl not in _IMPLEMENTATIONS:
        known = ", ".join(f'"{name}"' for name in _IMPLEMENTATIONS)
        raise ImplementationError(f'impl="{impl}" is unknown; choose one of {known}')


def _config_of(
    subject: Config | nn.Module | AttentionSizes | str,
) -> Config | AttentionSizes | MultiHeadAttention:
    if isinstance(subject, str):
        return preset(subject)
    if isinstance(subject, (Config, AttentionSizes, MultiHeadAttention)):
        return subject
    config = getattr(subject, "config", None)
    if isinstance(config, Config):
        return config
    raise ConfigError(
        f"got a {type(subject).__name__}; expected a configuration, a model of this project, a MultiHeadAttention, "
        f"or a preset's name"
    )


def _write(
    s: Setting, config: Config | AttentionSizes | MultiHeadAttention, tokens: Any, mask: Mask | None
) -> Pairs | None:
    """Writes the program of this configuration; returns the pairs of its self-attention, where it has one."""
    if isinstance(config, VisionConfig):
        _fixed(config, tokens, mask, config.grid[0] * config.grid[1] + config.pooling.n_extra)
        return transformers.vision(s, config)
    if isinstance(config, EncoderDecoderConfig):
        source, target = _two(config, tokens)
        _within(config.positions, source, target)
        return transformers.encoder_decoder(s, config, source, target, mask)
    if isinstance(config, RecurrentSeq2SeqConfig):
        baselines.seq2seq(s, config, *_two(config, tokens))
        return None
    if isinstance(config, DecoderConfig) and config.cross_attention:
        source, target = _two(config, tokens)
        _within(config.positions, target)
        return transformers.decoder(s, config, target, mask, source)
    if isinstance(config, (EncoderConfig, DecoderConfig)):
        length = _one(config, tokens)
        _within(config.positions, length)
        if isinstance(config, EncoderConfig):
            return transformers.encoder(s, config, length, mask)
        return transformers.decoder(s, config, length, mask)
    if isinstance(config, RecurrentConfig):
        baselines.recurrent(s, config, _one(config, tokens))
        return None
    if isinstance(config, (AttentionSizes, MultiHeadAttention)):
        return _layer(s, config, tokens, mask)
    _without_sequence(s, config, tokens, mask)
    return None


def _without_sequence(s: Setting, config: Config, tokens: Any, mask: Mask | None) -> None:
    if not isinstance(config, (ConvNetConfig, LogisticRegressionConfig, AutoencoderConfig)):
        raise ConfigError(
            f"the cost of a {type(config).__name__} is not known; "
            "known are the Transformers and the baselines of clearhead.models"
        )
    _fixed(config, tokens, mask, None)
    if isinstance(config, ConvNetConfig):
        baselines.convnet(s, config)
    elif isinstance(config, LogisticRegressionConfig):
        baselines.logistic(s, config)
    else:
        baselines.autoencoder(s, config)


def _layer(s: Setting, layer: AttentionSizes | MultiHeadAttention, tokens: Any, mask: Mask | None) -> Pairs:
    """One attention layer over vectors that something before it learns from."""
    queries, keys = _reversed_two(layer, tokens)
    T = s.letter("T", queries)
    S = T if keys == queries else s.letter("S", keys)
    M, H = s.letter("M", layer.d_model), s.letter("H", layer.n_heads)
    K = H if layer.n_kv_heads in (None, layer.n_heads) else s.letter("K", layer.n_kv_heads)
    own_width = layer.d_head is not None and layer.d_head * layer.n_heads != layer.d_model
    D = s.letter("D", layer.d_head or 0) if own_width else exact_ratio(M, H)
    heads = Heads(M, H, K, D, *_layer_choices(layer))
    pairs = pairs_of(s, mask, heads, T, S)
    needs_tensor = mask is not None and not isinstance(mask, (Full, Causal))
    p = s.program
    p.inputs.append(s.tensor("x", s.B * T * M))
    memory = None
    if keys != queries:
        p.inputs.append(s.tensor("memory", s.B * S * M))
        memory = "memory"
    p.with_gradient.update({"x", "memory"})
    attention(s, "attention", "", "x", heads, Sight(T, S, pairs, needs_tensor, writes=True), memory)
    if s.training:
        squares(s, "attended", s.B * T * M)
    return pairs


def _layer_choices(layer: AttentionSizes | MultiHeadAttention) -> tuple[Any, ...]:
    if isinstance(layer, AttentionSizes):
        return layer.bias, layer.dropout, layer.rotary
    if not isinstance(layer.scores, (ScaledDot, Dot)) or not isinstance(layer.training_weights, Softmax):
        raise ConfigError(
            f"the cost of {type(layer.scores).__name__} scores with {type(layer.weights).__name__} weights is not "
            "known; expected a dot product and a softmax"
        )
    if {layer.k_proj.in_features, layer.v_proj.in_features} != {layer.d_model}:
        raise ConfigError("the cost of a layer whose keys or values have another width than d_model is not known")
    return layer.q_proj.bias is not None, layer.training_weights.dropout, layer.rotary


# ---------------------------------------------------------------------- lengths


def _one(config: Any, tokens: Any) -> int:
    if tokens is None:
        raise ConfigError(f"tokens was not given; {_label(config)} needs a length, such as tokens=1000")
    if isinstance(tokens, (tuple, list)):
        raise ConfigError(f"tokens is {tuple(tokens)}; {_label(config)} reads one sequence: expected one number")
    _check_sizes(tokens=tokens)
    return int(tokens)


def _two(config: Any, tokens: Any) -> tuple[int, int]:
    """(source, target), or one number for both."""
    if not isinstance(tokens, (tuple, list)):
        n = _one(config, tokens)
        return n, n
    if len(tokens) != 2:
        raise ConfigError(f"tokens is {tuple(tokens)}; expected one number, or two: (source, target)")
    _check_sizes(source=tokens[0], target=tokens[1])
    return tokens[0], tokens[1]


def _reversed_two(layer: Any, tokens: Any) -> tuple[int, int]:
    """(queries, keys) from (source, target): a target token asks, a source token answers."""
    source, target = _two(layer, tokens)
    return target, source


def _fixed(config: Config, tokens: Any, mask: Mask | None, length: int | None) -> None:
    """Models whose input has one size: `tokens` may be left out, and must fit if given."""
    if mask is not None:
        raise ConfigError(f"{_label(config)} takes no mask; leave it out")
    if tokens is not None and tokens != length:
        what = (
            "takes no sequence; leave tokens out"
            if length is None
            else (
                f"of these images reads {length} tokens, got tokens={tokens}; change image_size in its configuration instead"
            )
        )
        raise ShapeError(f"{_label(config)} {what}")


def _within(positions: Any, *lengths: int) -> None:
    if isinstance(positions, Learned) and max(lengths) > positions.length:
        raise ShapeError(
            f"{max(lengths)} tokens are more than the {positions.length} learned positions; "
            f"shorten the input, or configure positions=Learned(max_len={max(lengths)})"
        )
