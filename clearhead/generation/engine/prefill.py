"""Prefill: process prompts of any lengths at once, and write their keys and values into their slots.

Linear layers process the tokens of all prompts end to end, without padding. Attention runs on groups of prompts of
similar lengths, padded on the right, where a causal mask hides the padding; under other masks a group has one length.

    N tokens of all prompts   P prompts   T tokens of the longest prompt of a group   M model width   D head width
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead.attention import attend
from clearhead.attention.biases import Bias
from clearhead.generation.engine.fused_attention import FusedAttention
from clearhead.generation.engine.program import Attends, DecoderProgram
from clearhead.generation.engine.static_cache import StaticKVCache
from clearhead.generation.prompts import pad_rows
from clearhead.masks import Causal, Mask, padding
from clearhead.masks.regions import Region
from clearhead.ops.fused_linear import fused_linear_prefill
from clearhead.ops.onednn_linear import inference_linears

_MAX_TOKENS = 16_384  # tokens of one pass; a longer prompt is a pass by itself
_TOLERANCE = 1.25  # longest prompt of a padded group, relative to its shortest
_SHORT = 16  # tokens by which lengths of a group may always differ


class _PromptGroup(NamedTuple):
    """Prompts of similar lengths. `tokens` are None if the group is all tokens, in order, without padding."""

    n: int
    T: int
    tokens: Tensor | None  # (n · T,) index of each token among all; padding repeats the last token of its prompt
    is_token: Tensor | None  # (n · T,) False for padding


def prefill(
    program: DecoderProgram, cache: StaticKVCache, prompts: Sequence[Tensor], rows: Sequence[int]
) -> Float[Tensor, "P V"]:
    """Process prompts into the slots of these rows, and return the logits of their next ids."""
    logits = []
    for first, last in _passes([len(prompt) for prompt in prompts]):
        logits.append(_prefill_pass(program, cache, prompts[first:last], rows[first:last]))
    index = torch.tensor(rows, device=program.device)
    cache.lengths[index] = torch.tensor([len(prompt) for prompt in prompts], device=program.device)
    return logits[0] if len(logits) == 1 else torch.cat(logits)


def _passes(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of prompts that together have at most `_MAX_TOKENS` tokens."""
    first = total = 0
    for i, length in enumerate(lengths):
        if total and total + length > _MAX_TOKENS:
            yield first, i
            first = i
            total = 0
        total += length
    yield first, len(lengths)


def _prefill_pass(
    program: DecoderProgram, cache: StaticKVCache, prompts: Sequence[Tensor], rows: Sequence[int]
) -> Float[Tensor, "P V"]:
    """Process some prompts in one pass of the model."""
    device = program.device
    lengths = [len(prompt) for prompt in prompts]
    n_tokens = torch.tensor(lengths)
    ids = torch.cat(list(prompts)).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    indices = cache.prompt_indices(list(rows), lengths)
    groups = [
        [_group(members, lengths, device) for members in _group_by_length(lengths, _can_pad(mask, max(lengths)))]
        for mask in program.masks
    ]
    decoder = program.decoder
    biases: dict[tuple[nn.Module, int], Bias] = {}

    def bias_of(i: int, T: int) -> Bias | None:
        relative = program.relative_positions[i]
        if relative is not None and (relative, T) not in biases:
            biases[relative, T] = relative(T, T, 0, device)
        return None if relative is None else biases[relative, T]

    def self_attend(i: int, layer: FusedAttention, qkv: Tensor) -> Tensor:
        qkv = layer.normalize_heads(qkv)
        q, k, v = qkv.split((layer.n_heads, layer.n_kv_heads, layer.n_kv_heads), dim=1)  # (N, heads, D)
        if layer.rotary is not None:
            q, k = (layer.rotary.rotate(x.transpose(0, 1), positions).transpose(0, 1) for x in (q, k))
        cache.write_prompts(i, indices, k, v)
        out = torch.empty_like(q)
        for group in groups[i]:
            out = _attend_group(group, program.masks[i], layer, (q, k, v), bias_of(i, group.T), out)
        return out

    def memory_attend(i: int, layer: FusedAttention, q: Tensor) -> Tensor:
        q = layer.normalize_heads(q)
        out = torch.empty_like(q)
        for group in memory_groups:
            out = _attend_memory(group, cache, i, layer, q, out)
        return out

    memory_groups = _memory_groups(cache, lengths, rows, device) if cache.memory else []
    table_positions = positions[None] if decoder.adds_positions else None
    x = decoder.add_positions(program.embedding(ids[None]), table_positions)[0]  # (N, M)
    x = program.run_layers(x, Attends(self_attend, memory_attend), fused_linear_prefill)
    last = n_tokens.cumsum(0) - 1
    return program.logits_of(x.index_select(0, last.to(device)), fused_linear_prefill)


def _can_pad(mask: Mask, length: int) -> bool:
    """Return whether no token attends to a later one, so that padding on the right changes nothing."""
    return isinstance(mask, Causal) or mask.classify(Region(0, length - 1, 0, length - 1, 1 - length, -1)) is False


def _group_by_length(lengths: Sequence[int], can_pad: bool) -> list[list[int]]:
    """Return groups of indices with similar lengths, or with one length each."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        shortest = lengths[groups[-1][0]] if groups else 0
        limit = max(shortest + _SHORT, int(shortest * _TOLERANCE)) if can_pad else shortest
        if groups and lengths[i] <= limit:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _group(members: list[int], lengths: Sequence[int], device: torch.device) -> _PromptGroup:
    """Return the tokens of the member prompts, padded to their longest."""
    T = max(lengths[i] for i in members)
    if len(members) == len(lengths) and all(length == T for length in lengths):
        return _PromptGroup(len(members), T, None, None)
    starts = torch.tensor([0, *lengths]).cumsum(0)[members]
    sizes = torch.tensor([lengths[i] for i in members])
    column = torch.arange(T).expand(len(members), T)
    tokens = starts[:, None] + column.minimum(sizes[:, None] - 1)
    return _PromptGroup(len(members), T, tokens.flatten().to(device), (column < sizes[:, None]).flatten().to(device))


def _attend_group(
    group: _PromptGroup,
    mask: Mask,
    layer: FusedAttention,
    qkv: tuple[Tensor, Tensor, Tensor],
    bias: Bias | None,
    out: Tensor,
) -> Tensor:
    """Compute the attention of one group of prompts, and write it to `out` (N, H, D)."""
    q, k, v = (_pad_group(x, group) for x in qkv)  # (n, heads, T, D)
    if q.is_cuda and isinstance(mask, Causal) and bias is None and layer.softcap is None and layer.sinks is None:
        gqa = layer.n_heads != layer.n_kv_heads  # the same as `attend`, with less host time
        result: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=gqa)
    else:
        result = attend(q, k, v, mask, bias=bias, scores=layer.scores, normalizer=layer.normalizer)
    return _scatter(result, group, out)


def _pad_group(x: Tensor, group: _PromptGroup) -> Tensor:
    """Return tokens (N, heads, D) of a group as (n, heads, T, D)."""
    x = x if group.tokens is None else x.index_select(0, group.tokens)
    padded: Tensor = x.unflatten(0, (group.n, group.T))
    return padded.transpose(1, 2)


def _scatter(result: Tensor, group: _PromptGroup, out: Tensor) -> Tensor:
    """Write the outputs (n, H, T, D) of a group to their tokens in `out` (N, H, D)."""
    flat = result.transpose(1, 2).flatten(0, 1)
    if group.tokens is None or group.is_token is None:
        return flat
    # Padding repeats the last token of its prompt, whose output must not be overwritten.
    out[group.tokens[group.is_token]] = flat[group.is_token]
    return out


def _memory_groups(
    cache: StaticKVCache, lengths: Sequence[int], rows: Sequence[int], device: torch.device
) -> list[tuple[_PromptGroup, Tensor, int, Mask | None]]:
    """Return groups of prompts of one length, their slots, and the longest encoder output with its mask."""
    groups = []
    for members in _group_by_length(lengths, can_pad=False):
        index = torch.tensor([rows[i] for i in members], device=device)
        sizes = cache.memory_lengths[index]
        slots = cache.slots[index] if cache.is_static else index
        shortest, longest = (int(x) for x in torch.aminmax(sizes))
        mask = padding(sizes) if shortest < longest else None
        groups.append((_group(members, lengths, device), slots, longest, mask))
    return groups


def _attend_memory(
    group: tuple[_PromptGroup, Tensor, int, Mask | None],
    cache: StaticKVCache,
    i: int,
    layer: FusedAttention,
    q: Tensor,
    out: Tensor,
) -> Tensor:
    """Compute the attention of one group of prompts to their encoder outputs."""
    tokens, slots, longest, mask = group
    k, v = (x[slots, :, :longest] for x in cache.memory[i])
    result: Tensor = attend(_pad_group(q, tokens), k, v, mask, scores=layer.scores, normalizer=layer.normalizer)
    return _scatter(result, tokens, out)


def encode(
    model: Any, program: DecoderProgram, cache: StaticKVCache, sources: Sequence[Tensor], rows: Sequence[int]
) -> None:
    """Encode sources of any lengths, and write the keys and values of cross-attention into the slots of these rows."""
    lengths = [len(source) for source in sources]
    config = model.config
    can_pad = not config.union_mask(config.encoder_mask).depends_on_length
    for members in _group_by_length(lengths, can_pad):
        source = pad_rows([sources[i] for i in members]).to(program.device)  # (B, S), or frames (B, T, F)
        sizes = torch.tensor([lengths[i] for i in members], device=program.device)
        mask = padding(sizes) if len({lengths[i] for i in members}) > 1 else None
        with inference_linears():
            memory = model.encode(source, mask=mask)
        if memory.shape[1] != source.shape[1]:  # audio is shortened
            sizes = torch.full_like(sizes, memory.shape[1])
        B, S = memory.shape[:2]
        keys_values = [
            (k.unflatten(0, (B, S)), v.unflatten(0, (B, S)))
            for k, v in program.memory_keys_values(memory.flatten(0, 1), fused_linear_prefill)
        ]
        cache.write_memory([rows[i] for i in members], keys_values, sizes)
