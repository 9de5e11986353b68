"""A decoder's forward pass on its parameters, without calling its modules.

`DecoderProgram` reads the parameters of a `Decoder` once (q, k and v concatenated, so that one product computes all
three), and runs the prompt, and then one token per row. It supports every decoder that the configurations of this
package can build. `unsupported_reason` returns why it would differ from calling the model: hooks, replaced modules, or
a mask that depends on data. A `StaticKVCache` stores the keys and values and computes attention.

    B prompts   R rows   T tokens of a prompt   M model width   H query heads   K key/value heads   D head width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from clearhead._core.tensor_state import runs_triton
from clearhead.attention import attend
from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import Dot, Scaled, ScaledDot
from clearhead.masks import Causal, Mask
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.stack import and_masks
from clearhead.nn import (
    Block,
    ExpertsFeedForward,
    FeedForward,
    MultiHeadAttention,
    Parallel,
    PostNorm,
    PreNorm,
    TokenEmbedding,
)
from clearhead.nn.modes import iter_modules
from clearhead.nn.norms import UnitOffsetRMSNorm
from clearhead.nn.positions import ALiBiBias, LearnedPositionEmbedding, Rotary, SinusoidalPositions, T5Bias
from clearhead.ops.activations import ClampedSwiGLU
from clearhead.ops.fused_linear import FusedLinearSpec, apply_norm, fused_linear_decode, fused_linear_prefill

_SUPPORTED_MODULES = (
    *(Decoder, EncoderDecoder, Block, MultiHeadAttention, FeedForward, TokenEmbedding),
    *(LearnedPositionEmbedding, SinusoidalPositions, T5Bias, ALiBiBias),
    *(nn.Linear, nn.LayerNorm, nn.RMSNorm, UnitOffsetRMSNorm, nn.Dropout, nn.Identity, nn.ModuleList),
)

_LONGEST = 1 << 40  # longer than any sequence

LinearFn = Callable[..., Tensor]
TorchNorm = nn.LayerNorm | nn.RMSNorm


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
        if isinstance(module, Block) and type(module.residual) not in (PreNorm, PostNorm, Parallel):
            return f"a block has {type(module.residual).__name__} residuals"
        if isinstance(module, Block) and module.norm2 is None:
            return "the branches of a block share a norm"
        if isinstance(module, FeedForward) and isinstance(module.activation, ClampedSwiGLU):
            return "a feed-forward has a ClampedSwiGLU activation"
        if isinstance(module, ExpertsFeedForward):
            return "it has a mixture of experts"
        if type(module) not in _SUPPORTED_MODULES or "forward" in vars(module):
            return f"a {type(module).__name__} was replaced or patched"
        if isinstance(module, MultiHeadAttention) and (reason := _unsupported_attention_reason(module)):
            return f"an attention layer {reason}"
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    if len({(p.dtype, p.device) for p in parameters}) != 1:
        return "its parameters have several dtypes or devices"
    if any(type(p) is not nn.Parameter for p in parameters):
        return "its parameters are subclasses of nn.Parameter"
    device = parameters[0].device.type
    if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
        return f"it runs under autocast or on {device}"
    mask = decoder.config.mask
    if decoder.config.layer_masks or decoder.config.layer_rotary or decoder.config.positions_per_layer:
        return "its layers have different masks or positions"
    if not decoder.config.rotates_equally(1, _LONGEST):
        return "its rotary positions depend on the length of the sequence"
    if not decoder.config.lm_head:
        return "it has no language-model head"
    if not mask.is_structural or mask.depends_on_length:
        return f"{mask} contains tensors or depends on the length"
    return None


def _unsupported_attention_reason(attention: MultiHeadAttention) -> str | None:
    """Return why the program does not support an attention layer."""
    if type(attention.scores) not in (Dot, ScaledDot, Scaled):
        return f"has {type(attention.scores).__name__} scores"
    if not isinstance(attention.normalizer, Softmax) or attention.normalizer.temperature != 1.0:
        return "does not normalize by a softmax of temperature 1"
    if attention.sinks is not None:
        return "has attention sinks"
    if attention.qk_norm_all_heads:
        return "normalizes all heads at once"
    if attention.impl != "auto":
        return f"has impl={attention.impl!r}"
    return None


class CrossMemory(NamedTuple):
    """Encoder outputs as each layer's cross-attention uses them.

    `keys_values` are (B, K, S, D) per layer. Padding is hidden by `mask` during the prefill, and by `bias` (B, 1, S) in
    decode steps; both are None without padding.
    """

    keys_values: list[Any]
    mask: Mask | None
    bias: Tensor | None


class FusedAttention:
    """Projections and sizes of one attention layer; `is_cross` for attention over encoder outputs."""

    def __init__(self, attention: MultiHeadAttention, norm: TorchNorm | None, *, is_cross: bool = False) -> None:
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self.q = _joined_linear(*((q,) if is_cross else (q, k, v)), norm=norm)
        self.memory = _joined_linear(k, v) if is_cross else None
        self.out = _joined_linear(attention.o_proj)
        self.n_heads = attention.n_heads
        self.n_kv_heads = attention.n_kv_heads
        self.d_head = attention.d_head
        self.norms = _torch_norm(attention.q_norm), _torch_norm(attention.k_norm)
        self.scores = attention.scores
        is_scaled = isinstance(attention.scores, ScaledDot)
        self.scale = self.d_head**-0.5 if is_scaled else getattr(attention.scores, "scale", 1.0)

    def normalize_heads(self, qkv: Tensor) -> Tensor:
        """Apply the norms of queries and keys, if any, to heads (…, heads, D)."""
        if self.norms[0] is None and self.norms[1] is None:
            return qkv
        n_keys = 0 if self.memory is not None else self.n_kv_heads
        q, k, v = qkv.split((self.n_heads, n_keys, n_keys), dim=-2)
        q, k = (x if norm is None else apply_norm(x, norm) for x, norm in zip((q, k), self.norms, strict=True))
        return torch.cat((q, k, v), dim=-2)


class _FusedLayer:
    """Parameters of one block. `norms` follow the residual sums of self-attention, cross-attention and feed-forward."""

    def __init__(self, block: Block) -> None:
        is_post_norm = isinstance(block.residual, PostNorm)
        norms = tuple(_torch_norm(norm) for norm in (block.norm1, block.norm_cross, block.norm2))
        norm1, norm_cross, norm2 = (None, None, None) if is_post_norm else norms
        self.norms = norms if is_post_norm else (None, None, None)
        self.self_attention = FusedAttention(block.attention, norm1)
        self.cross_attention = None
        if block.cross_attention is not None:
            self.cross_attention = FusedAttention(block.cross_attention, norm_cross, is_cross=True)
        ff = block.feed_forward
        assert isinstance(ff, FeedForward), "unsupported_reason excludes other types"
        gate = () if ff.gate is None else (ff.gate.weight.detach(), _detach(ff.gate.bias))
        self.up = FusedLinearSpec(ff.up.weight.detach(), _detach(ff.up.bias), norm2, ff.activation, *gate)
        self.down = _joined_linear(ff.down)
        self.is_parallel = isinstance(block.residual, Parallel)  # every branch uses the block's input


AttendFn = Callable[[int, FusedAttention, Tensor], Tensor]


class DecoderProgram:
    """The forward pass of one decoder. It shares the decoder's parameters, except for copies of joined q, k and v."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self.decoder = decoder
        self.embedding = decoder.embedding
        weight = decoder.lm_head_weight()
        self.device = weight.device
        self.dtype = weight.dtype
        self.logits = FusedLinearSpec(weight.detach(), norm=_torch_norm(decoder.norm))
        self.embedding_norm = _torch_norm(decoder.embedding_norm)
        self.rotary = config.positions if isinstance(config.positions, Rotary) else None
        self.layers = [_FusedLayer(block) for block in decoder.blocks if isinstance(block, Block)]
        self.n_kv_heads = config.kv_heads
        self.d_head = config.head_width
        self.mask = config.mask
        # Size of a token in the KV cache.
        self.bytes_per_token = 2 * len(self.layers) * self.n_kv_heads * self.d_head * weight.element_size()

    def decode_step(
        self, x: Tensor, self_attend: AttendFn, cross_attend: AttendFn, linear: LinearFn = fused_linear_decode
    ) -> Tensor:
        """Return the next logits (R, V) for one embedded token per row (R, M).

        `self_attend` and `cross_attend` compute attention from the layer's index, its `FusedAttention` and its heads:
        (R, H + 2K, D), or (R, H, D) for cross-attention. `linear` is `fused_linear_decode`, or
        `fused_linear_reference` if compiling its kernels does not pay off.
        """
        x = x if self.embedding_norm is None else apply_norm(x, self.embedding_norm)
        return self._postprocess(linear(self._run_layers(x, linear, self_attend, cross_attend), self.logits))

    def prefill(
        self,
        ids: Tensor,
        *,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        memory: CrossMemory | None = None,
        last: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the logits (B, V) after prompts (B, T), and each layer's keys and values (B, K, T, D).

        `last` (1,) is the index of the last prompt token, if padding follows.
        """
        B, T = ids.shape
        keys_values: list[tuple[Tensor, Tensor]] = []
        decoder = self.decoder
        bias: Any = None
        if decoder.positions is not None and not decoder.adds_positions:
            bias = decoder.positions(T, T, 0, ids.device)
        full_mask = and_masks(self.mask, mask)
        index = torch.arange(T, device=ids.device)

        def self_attend(i: int, layer: FusedAttention, qkv: Tensor) -> Tensor:
            heads = qkv.view(B, T, -1, layer.d_head).transpose(1, 2)  # (B, H + 2K, T, D)
            q, k, v = heads.split((layer.n_heads, layer.n_kv_heads, layer.n_kv_heads), dim=1)
            if self.rotary is not None:
                q = self.rotary.rotate(q, index)
                k = self.rotary.rotate(k, index)
            keys_values.append((k, v))
            if q.is_cuda and isinstance(full_mask, Causal) and bias is None:  # same as `attend`, with less host time
                gqa = layer.n_heads != layer.n_kv_heads
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=gqa)
            else:
                out = attend(q, k, v, full_mask, bias=bias, scores=layer.scores)
            return out.transpose(1, 2).reshape(B * T, -1, layer.d_head)

        def cross_attend(i: int, layer: FusedAttention, q: Tensor) -> Tensor:
            assert memory is not None  # a decoder with cross-attention gets one
            k, v = memory.keys_values[i]
            out = attend(q.view(B, T, -1, layer.d_head).transpose(1, 2), k, v, memory.mask, scores=layer.scores)
            return out.transpose(1, 2).reshape(B * T, -1, layer.d_head)

        x = decoder.add_positions(self.embedding(ids), positions).flatten(0, 1)  # (B·T, M)
        x = self._run_layers(x, fused_linear_prefill, self_attend, cross_attend)
        x = x.view(B, T, -1)
        x = x[:, -1].contiguous() if last is None else x.index_select(1, last).squeeze(1)
        return self._postprocess(fused_linear_prefill(x, self.logits)), keys_values

    def _run_layers(self, x: Tensor, linear: LinearFn, self_attend: AttendFn, cross_attend: AttendFn) -> Tensor:
        """Apply all layers to x (N, M)."""
        for i, layer in enumerate(self.layers):
            block_input = x
            branches = (
                (layer.self_attention, self_attend, layer.norms[0]),
                (layer.cross_attention, cross_attend, layer.norms[1]),
            )
            for attention, attend_fn, norm in branches:
                if attention is None:
                    continue
                heads = linear(block_input if layer.is_parallel else x, attention.q)
                heads = attention.normalize_heads(heads.view(len(x), -1, attention.d_head))
                x = linear(attend_fn(i, attention, heads).flatten(1), attention.out, x)
                x = x if norm is None else apply_norm(x, norm)
            x = linear(linear(block_input if layer.is_parallel else x, layer.up), layer.down, x)
            x = x if layer.norms[2] is None else apply_norm(x, layer.norms[2])
        return x

    def cross_memory(self, memory: Tensor, mask: Mask | None, bias: Tensor | None) -> CrossMemory:
        """Project encoder outputs (B, S, M) to each layer's keys and values."""
        B, S = memory.shape[:2]
        keys_values = []
        for layer in self.layers:
            cross = layer.cross_attention
            assert cross is not None
            assert cross.memory is not None
            heads = fused_linear_prefill(memory.flatten(0, 1), cross.memory).view(
                B, S, 2, cross.n_kv_heads, cross.d_head
            )
            k, v = heads.unbind(2)
            norm = cross.norms[1]
            k = k if norm is None else apply_norm(k, norm)
            keys_values.append((k.transpose(1, 2), v.transpose(1, 2)))
        return CrossMemory(keys_values, mask, bias)

    def _postprocess(self, products: Tensor) -> Tensor:
        """Return logits from the products with the vocabulary."""
        scale = self.decoder.config.logit_scale
        return self.decoder.postprocess_logits(products if scale == 1 else products * scale)

    def embed_newest(
        self, ids: Tensor, table: Tensor | None, length: Tensor, left_pad: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the newest tokens (R,) embedded with their positions (R, M), and the length including them.

        `table` contains the positions to add; `left_pad` is the padding of each row.
        """
        weight = self.embedding.weight
        scale = self.embedding.scale if self.embedding.scaled else None
        if runs_triton(ids) and self.dtype != torch.float64:
            from clearhead.generation.engine.embed_token_triton import embed_token

            return embed_token(ids, weight, scale, table, length, left_pad)
        x = F.embedding(ids, weight)
        x = x if scale is None else x * scale
        if table is not None:
            x = x + F.embedding(length.reshape(1) if left_pad is None else length - left_pad, table)
        return x, length + 1


def _joined_linear(*linears: nn.Linear, norm: TorchNorm | None = None) -> FusedLinearSpec:
    """Join linear maps of the same (normalized) input into one; a single one shares its memory."""
    if len(linears) == 1:
        return FusedLinearSpec(linears[0].weight.detach(), _detach(linears[0].bias), norm)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return FusedLinearSpec(weight, None, norm)
    biases = [weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears]
    return FusedLinearSpec(weight, torch.cat(biases), norm)


def _torch_norm(norm: nn.Module | None) -> TorchNorm | None:
    """Return a norm as torch's module; one that scales by 1 + weight is copied with the sum as its weight."""
    if isinstance(norm, UnitOffsetRMSNorm):
        plain = nn.RMSNorm(norm.normalized_shape, eps=norm.eps, device=norm.weight.device, dtype=norm.weight.dtype)
        plain.weight.copy_(1 + norm.weight)
        return plain
    return norm if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) else None


def _detach(x: Tensor | None) -> Tensor | None:
    """Detach a tensor, if any."""
    return None if x is None else x.detach()
