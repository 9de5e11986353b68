"""A decoder as a straight line of operators: what its modules compute, without calling them.

`Program` walks a `Decoder` once, takes its parameters along (q, k and v side by side, so that one product makes all
three), and runs the line for the prompt and then for one token a row. It knows every decoder that this project's
configurations can build; `why_not` says why it would not be the same as calling the model: hooks that watch it, parts
that are not the ones that were built, a mask that moves. Keys and values are kept in a `Room`, which also attends.

    B prompts   R rows   T tokens of a prompt   M model width   H query heads   K key/value heads   D head width"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from clearhead._numbers import runs_triton
from clearhead.attention import MultiHeadAttention, attend
from clearhead.attention.scores import Dot, Scaled, ScaledDot
from clearhead.attention.weights import Softmax
from clearhead.generation.quiet import parts_of
from clearhead.layers import Block, ExpertsFeedForward, FeedForward, Parallel, PostNorm, PreNorm, TokenEmbedding
from clearhead.layers.few_rows import Product, few_rows, many_rows, normed
from clearhead.layers.norms import PlusOneRMSNorm
from clearhead.masks import Causal, Mask
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.stack import and_masks
from clearhead.positions import BucketedBias, LearnedPositions, LinearBias, Rotary, SinusoidalPositions

_KNOWN = (
    *(Decoder, EncoderDecoder, Block, MultiHeadAttention, FeedForward, TokenEmbedding),
    *(LearnedPositions, SinusoidalPositions, BucketedBias, LinearBias),
    *(nn.Linear, nn.LayerNorm, nn.RMSNorm, PlusOneRMSNorm, nn.Dropout, nn.Identity, nn.ModuleList),
)

Rows = Callable[..., Tensor]
TorchNorm = nn.LayerNorm | nn.RMSNorm


def why_not(model: Decoder | EncoderDecoder) -> str | None:
    """Why the program would not be the same as the model, or None if it is."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return "hooks on all modules are watching"
    everything = parts_of(model)
    for part in everything:
        if part._forward_hooks or part._forward_pre_hooks:
            return f"hooks are watching a {type(part).__name__}"
    decoder = model.decoder if isinstance(model, EncoderDecoder) else model
    parts = everything if decoder is model else parts_of(decoder)
    for part in parts:
        if isinstance(part, Block) and type(part.residual) not in (PreNorm, PostNorm, Parallel):
            return f"a block has {type(part.residual).__name__} residuals"
        if isinstance(part, ExpertsFeedForward):
            return "its tokens go to different experts"
        if type(part) not in _KNOWN or "forward" in vars(part):
            return f"a {type(part).__name__} was not built here"
        if isinstance(part, MultiHeadAttention) and (reason := _why_not_attention(part)):
            return f"an attention layer {reason}"
    weights = [weight for part in parts for weight in part._parameters.values() if weight is not None]
    if len({(w.dtype, w.device) for w in weights}) != 1:
        return "its weights have several dtypes or devices"
    if any(type(w) is not nn.Parameter for w in weights):
        return "its weights are not plain parameters"
    device = weights[0].device.type
    if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
        return f"it runs under autocast or on {device}"
    mask = decoder.config.mask
    if decoder.config.layer_masks or decoder.config.layer_rotary:
        return "its layers have masks or positions of their own"
    if not mask.is_structural or mask.depends_on_length:
        return f"{mask} holds tensors or changes with the length"
    return None


def _why_not_attention(part: MultiHeadAttention) -> str | None:
    if type(part.scores) not in (Dot, ScaledDot, Scaled):
        return f"has {type(part.scores).__name__} scores"
    if not isinstance(part.weights, Softmax) or part.weights.temperature != 1.0:
        return "does not weigh by a softmax of temperature 1"
    if part.impl != "auto":
        return "is computed in a way that was asked for"
    return None


class Memory(NamedTuple):
    """Keys and values (B, K, S, D) of a memory for every layer, and which of its tokens count: for attention over many
    tokens a mask, for that of one a row a bias (B, 1, S); None for all of them."""

    kept: list[Any]
    mask: Mask | None
    bias: Tensor | None


class Attention:
    """Projections and sizes of one attention layer; `memory`: of one that reads an encoder's memory."""

    def __init__(self, part: MultiHeadAttention, norm: TorchNorm | None, *, memory: bool = False) -> None:
        q, k, v = part.q_proj, part.k_proj, part.v_proj
        self.q = _side_by_side(*((q,) if memory else (q, k, v)), norm=norm)
        self.memory = _side_by_side(k, v) if memory else None
        self.out = _side_by_side(part.o_proj)
        self.n_heads, self.n_kv_heads, self.d_head = part.n_heads, part.n_kv_heads, part.d_head
        self.norms = _norm(part.q_norm), _norm(part.k_norm)  # of every head's query and key
        self.scores = part.scores  # a dot product, maybe scaled
        # What the products of queries and keys are multiplied by.
        self.scale = self.d_head**-0.5 if isinstance(part.scores, ScaledDot) else getattr(part.scores, "scale", 1.0)

    def headed(self, qkv: Tensor) -> Tensor:
        """Heads (…, heads, D) with the norms of queries and keys, where there are some."""
        if self.norms[0] is None and self.norms[1] is None:
            return qkv
        keys = 0 if self.memory is not None else self.n_kv_heads
        q, k, v = qkv.split((self.n_heads, keys, keys), dim=-2)
        q, k = (x if norm is None else normed(x, norm) for x, norm in zip((q, k), self.norms, strict=True))
        return torch.cat((q, k, v), dim=-2)


class _Layer:
    def __init__(self, block: Block) -> None:
        after = isinstance(block.residual, PostNorm)
        norms = tuple(_norm(norm) for norm in (block.norm1, block.norm_cross, block.norm2))
        own, cross, last = (None, None, None) if after else norms
        self.norms = norms if after else (None, None, None)  # after each sum: own, cross, feed-forward
        self.own = Attention(block.attention, own)
        self.cross = None if block.cross_attention is None else Attention(block.cross_attention, cross, memory=True)
        feed = block.feed_forward
        assert isinstance(feed, FeedForward), "why_not refuses the others"
        gate = () if feed.gate is None else (feed.gate.weight.detach(), _plain(feed.gate.bias))
        self.up = Product(feed.up.weight.detach(), _plain(feed.up.bias), last, feed.activation, *gate)
        self.down = _side_by_side(feed.down)
        self.parallel = isinstance(block.residual, Parallel)  # every branch reads what entered the block


Attend = Callable[[int, Attention, Tensor], Tensor]


class Program:
    """The line of one decoder. It shares the decoder's parameters, but for the joined q, k, v, which are copies."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self.decoder = decoder
        self.embedding = decoder.embedding
        weight = decoder.lm_head_weight()
        self.device, self.dtype = weight.device, weight.dtype
        self.logits = Product(weight.detach(), norm=_norm(decoder.norm))
        self.entrance = _norm(decoder.embedding_norm)
        self.rotary = config.positions if isinstance(config.positions, Rotary) else None
        self.layers = [_Layer(block) for block in decoder.blocks if isinstance(block, Block)]
        self.n_kv_heads, self.d_head = config.kv_heads, config.head_width
        self.mask = config.mask
        # What a cache keeps of a token.
        self.bytes_per_token = 2 * len(self.layers) * self.n_kv_heads * self.d_head * weight.element_size()

    def step(self, x: Tensor, own: Attend, cross: Attend, rows: Rows = few_rows) -> Tensor:
        """One token a row, as a vector at its place (R, M): the next logits (R, V). `own` and `cross` attend, given the
        layer's number, its sizes and its heads (R, H + 2K, D) or, over the memory, (R, H, D).

        `rows` multiplies: `few_rows`, or `few_rows_reference` where its kernels are not worth being compiled."""
        x = x if self.entrance is None else normed(x, self.entrance)
        return self._finished(rows(self._through(x, rows, own, cross), self.logits))

    def read(
        self,
        ids: Tensor,
        *,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        memory: Memory | None = None,
        last: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """A prompt (B, T): the logits (B, V) after it, or after place `last` (1,) of it, and each layer's keys and
        values (B, K, T, D)."""
        B, T = ids.shape
        kept: list[tuple[Tensor, Tensor]] = []
        decoder = self.decoder
        bias: Any = None
        if decoder.positions is not None and not decoder.adds_positions:
            bias = decoder.positions(T, T, 0, ids.device)
        everything = and_masks(self.mask, mask)
        places = torch.arange(T, device=ids.device)

        def own(i: int, part: Attention, qkv: Tensor) -> Tensor:
            heads = qkv.view(B, T, -1, part.d_head).transpose(1, 2)  # (B, H + 2K, T, D)
            q, k, v = heads.split((part.n_heads, part.n_kv_heads, part.n_kv_heads), dim=1)
            if self.rotary is not None:
                q, k = self.rotary.rotate(q, places), self.rotary.rotate(k, places)
            kept.append((k, v))
            if q.is_cuda and isinstance(everything, Causal) and bias is None:  # as `attend` would, sooner
                grouped = part.n_heads != part.n_kv_heads
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=part.scale, enable_gqa=grouped)
            else:
                out = attend(q, k, v, everything, bias=bias, scores=part.scores)
            return out.transpose(1, 2).reshape(B * T, -1, part.d_head)

        def cross(i: int, part: Attention, q: Tensor) -> Tensor:
            assert memory is not None  # who has cross-attention was given one
            k, v = memory.kept[i]
            out = attend(q.view(B, T, -1, part.d_head).transpose(1, 2), k, v, memory.mask, scores=part.scores)
            return out.transpose(1, 2).reshape(B * T, -1, part.d_head)

        x = decoder.add_positions(self.embedding(ids), positions).flatten(0, 1)  # (B·T, M)
        x = self._through(x, many_rows, own, cross)
        x = x.view(B, T, -1)
        x = x[:, -1].contiguous() if last is None else x.index_select(1, last).squeeze(1)
        return self._finished(many_rows(x, self.logits)), kept

    def _through(self, x: Tensor, rows: Rows, own: Attend, cross: Attend) -> Tensor:
        """x (N, M) through the layers."""
        for i, layer in enumerate(self.layers):
            entered = x
            for part, attends, norm in ((layer.own, own, layer.norms[0]), (layer.cross, cross, layer.norms[1])):
                if part is None:
                    continue
                heads = rows(entered if layer.parallel else x, part.q).view(len(x), -1, part.d_head)
                x = rows(attends(i, part, part.headed(heads)).flatten(1), part.out, x)
                x = x if norm is None else normed(x, norm)
            x = rows(rows(entered if layer.parallel else x, layer.up), layer.down, x)
            x = x if layer.norms[2] is None else normed(x, layer.norms[2])
        return x

    def remember(self, memory: Tensor, mask: Mask | None, bias: Tensor | None) -> Memory:
        """A memory (B, S, M) as each layer's cross-attention reads it."""
        B, S = memory.shape[:2]
        kept = []
        for layer in self.layers:
            cross = layer.cross
            assert cross is not None
            assert cross.memory is not None
            heads = many_rows(memory.flatten(0, 1), cross.memory).view(B, S, 2, cross.n_kv_heads, cross.d_head)
            (k, v), norm = heads.unbind(2), cross.norms[1]
            k = k if norm is None else normed(k, norm)
            kept.append((k.transpose(1, 2), v.transpose(1, 2)))
        return Memory(kept, mask, bias)

    def _finished(self, products: Tensor) -> Tensor:
        scale = self.decoder.config.logit_scale
        return self.decoder.postprocess_logits(products if scale == 1 else products * scale)

    def enter(self, ids: Tensor, table: Tensor | None, length: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """The newest tokens (R,) as vectors (R, M) at their places, and how many tokens there are with them. `table`:
        the rows that positions add; `before`: the padding in front of each row."""
        scale, weight = (self.embedding.scale if self.embedding.scaled else None), self.embedding.weight
        if runs_triton(ids) and self.dtype != torch.float64:
            from clearhead.generation.note_triton import enter

            return enter(ids, weight, scale, table, length, before)
        x = F.embedding(ids, weight)
        x = x if scale is None else x * scale
        if table is not None:
            x = x + F.embedding(length.reshape(1) if before is None else length - before, table)
        return x, length + 1


def _side_by_side(*parts: nn.Linear, norm: TorchNorm | None = None) -> Product:
    """Linear maps of the same input as one, after a norm of it; a single one shares its memory."""
    if len(parts) == 1:
        return Product(parts[0].weight.detach(), _plain(parts[0].bias), norm)
    weight = torch.cat([part.weight.detach() for part in parts])
    if all(part.bias is None for part in parts):
        return Product(weight, None, norm)
    biases = [weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    return Product(weight, torch.cat(biases), norm)


def _norm(norm: nn.Module | None) -> TorchNorm | None:
    """The norm as torch's module: one that scales by 1 + weight becomes one that scales by the sum."""
    if isinstance(norm, PlusOneRMSNorm):
        plain = nn.RMSNorm(norm.normalized_shape, eps=norm.eps, device=norm.weight.device, dtype=norm.weight.dtype)
        plain.weight.copy_(1 + norm.weight)
        return plain
    return norm if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) else None


def _plain(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
