"""A decoder's forward pass for generation, compiled from its modules.

`DecoderProgram` reads the parameters of a `Decoder` once (q, k and v joined, so that one product computes all three),
and runs prompts, and then one token per row. `MODULES`, `RESIDUALS` and `SCORES` list the classes that it supports.
Blocks with a plain residual connection and a dense feed-forward network are fused; other blocks call their own modules
around the attention. `unsupported_reason` returns why the program would differ from calling the model: hooks, replaced
modules, unknown configuration fields, or a mask that depends on data. A `StaticKVCache` stores the keys and values and
computes attention.

    N tokens   R rows   M model width   H query heads   K key/value heads   D head width
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import Dot, Scaled, ScaledDot, SoftCapped
from clearhead.generation.engine.fused_attention import (
    FusedAttention,
    FusedLatentAttention,
    LinearFn,
    TorchNorm,
    detach,
    joined_linear,
    torch_norm,
)
from clearhead.generation.engine.fused_experts import FusedExperts, can_fuse_experts
from clearhead.masks import Mask
from clearhead.models.decoder import Decoder, DecoderConfig
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.nn import (
    Block,
    ExpertsFeedForward,
    FeedForward,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    Parallel,
    PostNorm,
    PreNorm,
    SandwichNorm,
    TokenEmbedding,
)
from clearhead.nn.block import LayerScale, Multiplier
from clearhead.nn.modes import iter_modules
from clearhead.nn.norms import UnitOffsetRMSNorm
from clearhead.nn.positions import ALiBiBias, LearnedPositionEmbedding, Rotary, SinusoidalPositions, T5Bias
from clearhead.nn.residual import ResPostNorm
from clearhead.ops.activations import ClampedSwiGLU
from clearhead.ops.fused_linear import FusedLinearSpec, apply_norm, fused_linear_decode

MODULES = (
    *(Decoder, EncoderDecoder, Block, MultiHeadAttention, FeedForward, ExpertsFeedForward, LayerScale, TokenEmbedding),
    *(LearnedPositionEmbedding, SinusoidalPositions, T5Bias, ALiBiBias),
    *(nn.Linear, nn.LayerNorm, nn.RMSNorm, UnitOffsetRMSNorm, nn.Dropout, nn.Identity, nn.ModuleList, nn.Sequential),
    *(Multiplier, MultiHeadLatentAttention),
)
RESIDUALS = (PreNorm, PostNorm, Parallel, SandwichNorm, ResPostNorm)
SCORES = (Dot, ScaledDot, Scaled, SoftCapped)
CONFIG_FIELDS = frozenset({
    "d_model", "n_heads", "n_kv_heads", "d_head", "bias", "scores", "d_ff", "dropout", "attention_dropout",
    "feed_forward_dropout", "norm", "residual", "activation", "experts", "qk_norm", "layer_scale", "init",
    "embedding_norm", "first_norm", "vocab_size", "max_len", "positions", "scaled_embedding", "layer_masks",
    "layer_rotary", "tie_embeddings", "logit_bias", "logit_scale", "logit_softcap", "n_layers", "mask",
    "cross_attention", "embedding_multiplier", "qk_norm_all_heads", "branch_multiplier", "n_dense_layers",
    "sinks", "positions_per_layer", "latent",
})  # fmt: skip
"""Fields of `DecoderConfig` that the program implements. A field outside this list must have its default value."""

LONGEST = 1 << 40  # longer than any sequence


def unsupported_reason(model: Decoder | EncoderDecoder) -> str | None:
    """Return why the program would differ from the model's forward pass, or None if it is equivalent."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return "global forward hooks are registered"
    modules = iter_modules(model)
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            return f"a {type(module).__name__} has forward hooks"
    decoder = model.decoder if isinstance(model, EncoderDecoder) else model
    modules = modules if decoder is model else iter_modules(decoder)
    for module in modules:
        if isinstance(module, Block) and type(module.residual) not in RESIDUALS:
            return f"a block has {type(module.residual).__name__} residuals"
        if type(module) not in MODULES or "forward" in vars(module):
            return f"a {type(module).__name__} was replaced or patched"
        if isinstance(module, MultiHeadAttention) and (reason := _unsupported_attention_reason(module)):
            return f"an attention layer {reason}"
        if isinstance(module, Block) and not isinstance(module.feed_forward, (FeedForward, ExpertsFeedForward)):
            return "a feed-forward was replaced"
        if isinstance(module, FeedForward) and not all(isinstance(x, nn.Linear) for x in (module.up, module.down)):
            return "a linear layer was replaced"
    return _unsupported_config_reason(decoder.config) or _unsupported_parameters_reason(modules)


def _unsupported_attention_reason(attention: MultiHeadAttention) -> str | None:
    """Return why the program does not support an attention layer."""
    if type(attention.scores) not in SCORES:
        return f"has {type(attention.scores).__name__} scores"
    if not isinstance(attention.normalizer, Softmax) or attention.normalizer.temperature != 1.0:
        return "does not normalize by a softmax of temperature 1"
    if attention.impl != "auto":
        return f"has impl={attention.impl!r}"
    if not isinstance(attention.rotary, (Rotary, NoneType)):
        return f"has {type(attention.rotary).__name__} positions"
    is_latent = isinstance(attention, MultiHeadLatentAttention)
    names = ("q_proj", "kv_down", "kv_up", "o_proj") if is_latent else ("q_proj", "k_proj", "v_proj", "o_proj")
    is_linear = all(isinstance(getattr(attention, name), nn.Linear) for name in names)
    return None if is_linear else "has a replaced projection"


def _unsupported_config_reason(config: DecoderConfig) -> str | None:
    """Return which part of a configuration the program does not implement."""
    for field in dataclasses.fields(config):
        if field.name not in CONFIG_FIELDS and getattr(config, field.name) != field.default:
            return f"{field.name} is not implemented"
    if not config.rotates_equally(1, LONGEST):
        return "its rotary positions depend on the length of the sequence"
    for mask in (config.mask, *config.layer_masks):
        if not mask.is_structural or mask.depends_on_length:
            return f"{mask} contains tensors or depends on the length"
    return None


def _unsupported_parameters_reason(modules: list[nn.Module]) -> str | None:
    """Return why the program cannot use these parameters."""
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    if len({(p.dtype, p.device) for p in parameters}) != 1:
        return "its parameters have several dtypes or devices"
    if any(type(p) is not nn.Parameter for p in parameters):
        return "its parameters are subclasses of nn.Parameter"
    device = parameters[0].device.type
    if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
        return f"it runs under autocast or on {device}"
    return None


AttendFn = Callable[[int, FusedAttention, Tensor], Tensor]


class Attends(NamedTuple):
    """Functions that compute attention from the layer's index, its `FusedAttention` and its heads (N, heads, D)."""

    to_self: AttendFn  # heads are H + 2K
    to_memory: AttendFn  # heads are H


class _FusedFeedForward:
    """The two products of a dense feed-forward network, the first one with its norm and activation."""

    def __init__(self, module: FeedForward, norm: TorchNorm | None = None) -> None:
        gate = () if module.gate is None else (module.gate.weight.detach(), detach(module.gate.bias))
        self.up = FusedLinearSpec(module.up.weight.detach(), detach(module.up.bias), norm, module.activation, *gate)
        self.down = joined_linear(module.down)


class _FusedLayer:
    """One block with a plain residual connection: every linear layer takes its norm, activation and residual along."""

    is_capturable = True

    def __init__(self, block: Block) -> None:
        is_post_norm = isinstance(block.residual, PostNorm)
        norms = tuple(torch_norm(norm) for norm in (block.norm1, block.norm_cross, block.norm2))
        if block.norm2 is None:  # all branches read the same normalized input
            norms = (norms[0], None, norms[0])
        norm1, norm_cross, norm2 = (None, None, None) if is_post_norm else norms
        self.norms = norms if is_post_norm else (None, None, None)  # after the residual sums
        self.attentions = _attentions(block, norm1, norm_cross)
        ff = block.feed_forward
        assert isinstance(ff, FeedForward)
        self.feed_forward = _FusedFeedForward(ff, norm2)
        self.is_parallel = isinstance(block.residual, Parallel)  # every branch uses the block's input

    def __call__(self, i: int, x: Tensor, attends: Attends, linear: LinearFn) -> Tensor:
        # Sums may overwrite x, so parallel branches, which all use the block's input, read it first.
        ahead = {a: a.project(x, linear) for a in self.attentions if a is not None} if self.is_parallel else {}
        hidden = linear(x, self.feed_forward.up) if self.is_parallel else None
        for attention, attend, norm in zip(self.attentions, attends, self.norms, strict=False):
            if attention is None:
                continue
            heads = ahead[attention] if self.is_parallel else attention.project(x, linear)
            x = linear(attention.combine(attend(i, attention, heads)), attention.out, x)
            x = x if norm is None else apply_norm(x, norm)
        hidden = linear(x, self.feed_forward.up) if hidden is None else hidden
        x = linear(hidden, self.feed_forward.down, x)
        return x if self.norms[2] is None else apply_norm(x, self.norms[2])


class _ModularLayer:
    """One block with any residual connection and feed-forward: its norms and functions around fused products."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.attentions = _attentions(block, None, None)
        posts = (block.post_attention, block.post_cross_attention, block.post_feed_forward)
        self.posts = [nn.Identity() if post is None else post for post in posts]
        self.feed_forward: _FusedFeedForward | FusedExperts | nn.Module = block.feed_forward
        if isinstance(block.feed_forward, ExpertsFeedForward):
            if can_fuse_experts(block.feed_forward):
                self.feed_forward = FusedExperts(block.feed_forward)
        elif isinstance(block.feed_forward, FeedForward) and _has_plain_activation(block.feed_forward):
            self.feed_forward = _FusedFeedForward(block.feed_forward)

    @property
    def is_capturable(self) -> bool:
        """Whether a step reads nothing on the host, which the module of a mixture of experts does."""
        return not isinstance(self.feed_forward, ExpertsFeedForward)

    def __call__(self, i: int, x: Tensor, attends: Attends, linear: LinearFn) -> Tensor:
        block = self.block
        block_input = x
        norm1: nn.Module = block.norm1
        norm2: nn.Module = nn.Identity() if block.norm2 is None else block.norm2
        if block.norm2 is None:  # all branches read the same normalized input
            block_input = block.norm1(x)
            norm1 = nn.Identity()

        def branch(attention: FusedAttention, attend: AttendFn) -> Callable[[Tensor], Tensor]:
            def run(h: Tensor) -> Tensor:
                heads = attention.project(h, linear)
                return linear(attention.combine(attend(i, attention, heads)), attention.out)

            return run

        self_attention, cross = self.attentions
        assert self_attention is not None
        x = block.residual(x, norm1, branch(self_attention, attends.to_self), self.posts[0], block_input)
        if cross is not None and block.norm_cross is not None:
            x = block.residual(x, block.norm_cross, branch(cross, attends.to_memory), self.posts[1], block_input)

        def feed_forward(h: Tensor) -> Tensor:
            if isinstance(self.feed_forward, _FusedFeedForward):
                return linear(linear(h, self.feed_forward.up), self.feed_forward.down)
            out: Tensor = self.feed_forward(h)
            return out

        return block.residual(x, norm2, feed_forward, self.posts[2], block_input)


def _attentions(
    block: Block, norm: TorchNorm | None, norm_cross: TorchNorm | None
) -> tuple[FusedAttention, FusedAttention | None]:
    """Return the self-attention and the cross-attention of a block."""
    cross = block.cross_attention
    attention = block.attention
    self_attention: FusedAttention
    if isinstance(attention, MultiHeadLatentAttention):
        self_attention = FusedLatentAttention(attention, norm)
    else:
        self_attention = FusedAttention(attention, norm)
    return self_attention, None if cross is None else FusedAttention(cross, norm_cross, is_cross=True)


def _has_plain_activation(module: FeedForward) -> bool:
    """Return whether `FusedLinearSpec` can express the activation."""
    return not isinstance(module.activation, ClampedSwiGLU)


def _is_plain(block: Block) -> bool:
    """Return whether a block can be a `_FusedLayer`."""
    posts = (block.post_attention, block.post_cross_attention, block.post_feed_forward)
    return (
        isinstance(block.residual, (PreNorm, PostNorm, Parallel))
        and isinstance(block.feed_forward, FeedForward)
        and _has_plain_activation(block.feed_forward)
        and all(post is None for post in posts)
        and (block.norm2 is not None or block.cross_attention is None)
    )


class DecoderProgram:
    """The forward pass of one decoder. It shares the decoder's parameters, except for copies of joined q, k and v."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self.decoder = decoder
        self.embedding = decoder.embedding
        weight = decoder.lm_head_weight()
        self.device = weight.device
        self.dtype = weight.dtype
        self.logits = FusedLinearSpec(weight.detach(), norm=torch_norm(decoder.norm))
        self.embedding_norm = torch_norm(decoder.embedding_norm)
        blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        self.layers = [_FusedLayer(block) if _is_plain(block) else _ModularLayer(block) for block in blocks]
        self.calls_modules = any(isinstance(layer, _ModularLayer) for layer in self.layers)
        self.n_kv_heads = self.layers[0].attentions[0].n_kv_heads
        self.d_head = self.layers[0].attentions[0].d_head
        layer_masks = [mask & config.mask for mask in config.layer_masks] or [config.mask]
        self.masks: list[Mask] = [layer_masks[i % len(layer_masks)] for i in range(len(blocks))]  # of each layer
        shared = None if decoder.adds_positions else decoder.positions
        self.relative_positions: list[nn.Module | None] = list(decoder.layer_positions or [shared] * len(blocks))
        self.is_capturable = all(layer.is_capturable for layer in self.layers)
        # Size of a token in the KV cache.
        self.bytes_per_token = 2 * len(self.layers) * self.n_kv_heads * self.d_head * weight.element_size()

    def run_layers(self, x: Tensor, attends: Attends, linear: LinearFn) -> Tensor:
        """Apply all layers to x (N, M)."""
        for i, layer in enumerate(self.layers):
            x = layer(i, x, attends, linear)
        return x

    def logits_of(self, x: Tensor, linear: LinearFn = fused_linear_decode) -> Tensor:
        """Return the logits (R, V) of hidden states (R, M)."""
        products = linear(x, self.logits)
        scale = self.decoder.config.logit_scale
        return self.decoder.postprocess_logits(products if scale == 1 else products * scale)

    def memory_keys_values(self, memory: Tensor, linear: LinearFn) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values (N, K, D) of encoder outputs (N, M)."""
        keys_values = []
        for layer in self.layers:
            cross = layer.attentions[1]
            assert cross is not None
            assert cross.memory is not None
            heads = linear(memory, cross.memory).view(len(memory), 2, cross.n_kv_heads, cross.d_head)
            k, v = heads.unbind(1)
            keys_values.append((cross.normalize_keys(k), v))
        return keys_values
