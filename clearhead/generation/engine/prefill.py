"""Prefill: process prompts of any lengths at once, and write their keys and values into their slots.

Linear layers process the tokens of all prompts end to end, without padding. Attention runs on groups of prompts of
similar lengths, padded on the right, where a causal mask hides the padding; under other masks a group has one length.
All indices are computed on the host and copied together, so that no layer waits for the host or the device.

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


class _PromptTokens(NamedTuple):
    """The tokens of all prompts end to end."""

    ids: Tensor  # (N,)
    positions: Tensor  # (N,)
    from_end: Tensor  # (N,) 1 for the last token of a prompt, 2 for the one before
    row_of_token: Tensor  # (N,)
    rows: Tensor  # (P,)
    lengths: Tensor  # (P,)
    last: Tensor  # (P,) index of the last token


class _PromptGroups(NamedTuple):
    """Prompts in groups of similar lengths, each padded to its longest."""

    sizes: list[tuple[int, int]]  # (n, T) of each group
    # Which of all tokens are in the groups, where padding repeats the last token of its prompt, and where each token is
    # in the groups end to end (N,). None if one group is all tokens in order.
    moves: tuple[Tensor, Tensor] | None


class _MemoryGroup(NamedTuple):
    """The encoder outputs of a group of prompts."""

    slots: Tensor  # (n,)
    longest: int
    mask: Mask | None


def prefill(
    program: DecoderProgram, cache: StaticKVCache, prompts: Sequence[Tensor], rows: Sequence[int]
) -> Float[Tensor, "P V"]:
    """Process prompts into the slots of these rows, and return the logits of their next ids."""
    logits = []
    for first, last in _passes([len(prompt) for prompt in prompts]):
        logits.append(_prefill_pass(program, cache, prompts[first:last], rows[first:last]))
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
    can_pad = {mask: _can_pad(mask, max(lengths)) for mask in dict.fromkeys(program.masks)}
    paddings = {*can_pad.values(), False} if cache.memory else set(can_pad.values())
    groups_of = {pads: _group_prompts(lengths, pads) for pads in paddings}
    tokens, groups_of = _copy_together(_index_tokens(prompts, rows), groups_of, device)
    stored = cache.prompt_indices(tokens.row_of_token, tokens.positions, tokens.from_end, max(lengths))
    decoder = program.decoder
    biases: dict[tuple[nn.Module, int], Bias] = {}

    def bias_of(i: int, T: int) -> Bias | None:
        relative = program.relative_positions[i]
        if relative is not None and (relative, T) not in biases:
            biases[relative, T] = relative(T, T, 0, device)
        return None if relative is None else biases[relative, T]

    def self_attend(i: int, layer: FusedAttention, qkv: Tensor) -> Tensor:
        mask = program.masks[i]
        groups = groups_of[can_pad[mask]]
        qkv = layer.normalize_heads(qkv)
        parts = zip(*(_split(x, groups) for x in cache.write_prompts(i, layer, stored, qkv)), strict=True)
        return _join([_attend_group(layer, q, k, v, mask, bias_of(i, q.shape[2])) for q, k, v in parts], groups)

    def memory_attend(i: int, layer: FusedAttention, q: Tensor) -> Tensor:
        groups = groups_of[False]
        parts = zip(_split(layer.normalize_heads(q), groups), memory_groups, strict=True)
        return _join([_attend_memory(layer, part, cache.memory[i], memory) for part, memory in parts], groups)

    memory_groups = _memory_groups(cache, lengths, rows, device) if cache.memory else []
    table_positions = tokens.positions[None] if decoder.adds_positions else None
    x = decoder.add_positions(program.embedding(tokens.ids[None]), table_positions)[0]  # (N, M)
    x = program.run_layers(x, Attends(self_attend, memory_attend), fused_linear_prefill)
    cache.lengths[tokens.rows] = tokens.lengths
    return program.logits_of(x.index_select(0, tokens.last), fused_linear_prefill)


def _can_pad(mask: Mask, length: int) -> bool:
    """Return whether no token attends to a later one, so that padding on the right changes nothing."""
    return isinstance(mask, Causal) or mask.classify(Region(0, length - 1, 0, length - 1, 1 - length, -1)) is False


def _index_tokens(prompts: Sequence[Tensor], rows: Sequence[int]) -> _PromptTokens:
    """Return the tokens of prompts, on the host."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = lengths.cumsum(0)
    positions = torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
    from_end = lengths.repeat_interleave(lengths) - positions
    row = torch.tensor(rows)
    ids = torch.cat(list(prompts))
    return _PromptTokens(ids, positions, from_end, row.repeat_interleave(lengths), row, lengths, ends - 1)


def _copy_together(
    tokens: _PromptTokens, groups_of: dict[bool, _PromptGroups], device: torch.device
) -> tuple[_PromptTokens, dict[bool, _PromptGroups]]:
    """Copy all indices to the device in one copy, because each copy waits for the device."""
    tensors = [*tokens, *(x for groups in groups_of.values() for x in groups.moves or ())]
    copies = torch.cat(tensors).to(device).split([len(x) for x in tensors])
    moves = iter(copies[len(tokens) :])
    for pads, groups in groups_of.items():
        if groups.moves is not None:
            groups_of[pads] = groups._replace(moves=(next(moves), next(moves)))
    return _PromptTokens(*copies[: len(tokens)]), groups_of


def _group_by_length(lengths: Sequence[int], can_pad: bool) -> list[list[int]]:
    """Return groups of indices with similar lengths, or with one length each, by increasing length."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        shortest = lengths[groups[-1][0]] if groups else 0
        limit = max(shortest + _SHORT, int(shortest * _TOLERANCE)) if can_pad else shortest
        if groups and lengths[i] <= limit:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _group_prompts(lengths: Sequence[int], can_pad: bool) -> _PromptGroups:
    """Return prompts in groups of similar lengths, on the host."""
    members = _group_by_length(lengths, can_pad)
    sizes = [(len(group), lengths[group[-1]]) for group in members]
    if all(length == lengths[0] for length in lengths):
        return _PromptGroups(sizes, None)
    n_tokens = torch.tensor(lengths)
    starts = n_tokens.cumsum(0) - n_tokens
    padded_starts = torch.empty_like(starts)
    tokens: list[Tensor] = []
    for group, (n, T) in zip(members, sizes, strict=True):
        padded_starts[group] = sum(len(x) for x in tokens) + T * torch.arange(n)
        column = torch.arange(T).expand(n, T)
        tokens.append((starts[group, None] + column.minimum(n_tokens[group, None] - 1)).flatten())
    order = torch.arange(sum(lengths)) + (padded_starts - starts).repeat_interleave(n_tokens)
    return _PromptGroups(sizes, (torch.cat(tokens), order))


def _split(x: Tensor, groups: _PromptGroups) -> list[Tensor]:
    """Return tokens (N, heads, D) of all prompts as (n, heads, T, D) per group."""
    x = x if groups.moves is None else x.index_select(0, groups.moves[0])
    parts = x.split([n * T for n, T in groups.sizes])
    return [part.unflatten(0, size).transpose(1, 2) for part, size in zip(parts, groups.sizes, strict=True)]


def _join(parts: list[Tensor], groups: _PromptGroups) -> Tensor:
    """Return the outputs (n, H, T, D) of all groups as (N, H, D), in the order of the tokens."""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    x = flat[0] if len(flat) == 1 else torch.cat(flat)
    return x if groups.moves is None else x.index_select(0, groups.moves[1])


def _attend_group(layer: FusedAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Compute the attention of one group of prompts (n, heads, T, D)."""
    if q.is_cuda and isinstance(mask, Causal) and bias is None and layer.softcap is None and layer.sinks is None:
        gqa = layer.n_heads != layer.n_kv_heads  # the same as `attend`, with less host time
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=gqa)
    return attend(q, k, v, mask, bias=bias, scores=layer.scores, normalizer=layer.normalizer)


def _memory_groups(
    cache: StaticKVCache, lengths: Sequence[int], rows: Sequence[int], device: torch.device
) -> list[_MemoryGroup]:
    """Return the slots of each group of prompts of one length, and its longest encoder output with its mask."""
    groups = []
    for members in _group_by_length(lengths, can_pad=False):
        index = torch.tensor([rows[i] for i in members], device=device)
        sizes = cache.memory_lengths[index]
        slots = cache.slots[index] if cache.is_static else index
        shortest, longest = (int(x) for x in torch.aminmax(sizes))
        groups.append(_MemoryGroup(slots, longest, padding(sizes) if shortest < longest else None))
    return groups


def _attend_memory(
    layer: FusedAttention, q: Tensor, keys_values: tuple[Tensor, Tensor], memory: _MemoryGroup
) -> Tensor:
    """Compute the attention of one group of prompts (n, H, T, D) to their encoder outputs."""
    k, v = (x[memory.slots, :, : memory.longest] for x in keys_values)
    return attend(q, k, v, memory.mask, scores=layer.scores, normalizer=layer.normalizer)


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
