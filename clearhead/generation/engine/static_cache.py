"""The KV cache of the engine: a slot of fixed capacity per row, and a length per row.

Position p is stored at index p, or, if the layer's mask is a window, at p modulo the window (a ring buffer). Rows have
different lengths, so nothing is padded, and a slot can be given to another prompt at any time.

With static shapes, as on a GPU, everything that changes between steps is a tensor, so that a step can be captured once
and replayed at every length. Rows refer to slots through a table, and beams to the slots of their prefix through a
table of parents, so nothing is moved. Without static shapes, as on a CPU, only the used part is read, rows are moved
when they are reordered, and the slots grow when a row exceeds their capacity.

    R rows   S indices per slot   K, H key/value and query heads   D head width   M model width   N prompt tokens
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.tensor_state import runs_triton
from clearhead.attention.decode import (
    DecodeSlots,
    RotaryCosSin,
    apply_rotary,
    cross_attention,
    decode_attention,
    naive_attention,
    prefer_naive,
)
from clearhead.generation.engine.fused_attention import FusedAttention
from clearhead.generation.engine.layer_patterns import LayerPattern, layer_patterns
from clearhead.generation.engine.program import LONGEST, DecoderProgram
from clearhead.nn.positions import Rotary


class CacheShape(NamedTuple):
    """Size of a cache: number of slots, tokens per slot, and tokens of an encoder output per slot."""

    n_slots: int
    capacity: int
    memory_capacity: int = 0

    def covers(self, other: CacheShape) -> bool:
        """Return whether a cache of this size can be used in place of the other."""
        return all(mine >= needed for mine, needed in zip(self, other, strict=True))


class PromptIndices(NamedTuple):
    """Where the tokens of prompts are stored."""

    positions: Tensor  # (N,)
    slots: Tensor  # (N,)
    columns: dict[int, Tensor]  # (N,) per number of indices of a slot: the index, or −1 if the token is not stored
    longest: int  # tokens of the longest prompt


class StaticKVCache:
    """Keys and values of the rows of a batch.

    Attributes:
        slots: Slot of each row.
        lengths: Number of tokens of each row; the next one has this position.
        parents: The slot that stores each index of a row, if beams share prefixes, per number of indices.
    """

    def __init__(self, program: DecoderProgram, shape: CacheShape, *, is_static: bool) -> None:
        self.program = program
        self.shape = shape
        self.is_static = is_static
        device = program.device
        self.patterns = layer_patterns(program, shape.capacity)
        self._max_capacity = shape.capacity if is_static else getattr(program.decoder.positions, "length", LONGEST)
        self.n_rows = shape.n_slots
        self.slots = torch.arange(shape.n_slots, device=device)
        self.lengths = torch.zeros(shape.n_slots, dtype=torch.int64, device=device)
        self.parents: dict[int, Tensor] = {}  # (R, S) int32 per S
        self._parent_tables: dict[int, Tensor] = {}  # captured graphs refer to them
        self.keys = [self._empty(pattern.n_indices) for pattern in self.patterns]
        self.values = [self._empty(pattern.n_indices) for pattern in self.patterns]
        self._spare: dict[tuple[int, int], Tensor] = {}
        self.memory: list[tuple[Tensor, Tensor]] = []
        self.memory_lengths = torch.zeros(shape.n_slots, dtype=torch.int64, device=device)
        self.rows_per_memory = 1
        if shape.memory_capacity:
            size = shape.n_slots, program.n_kv_heads, shape.memory_capacity, program.d_head
            zeros = torch.zeros(2, len(program.layers), *size, dtype=program.dtype, device=device)
            self.memory = list(zip(*zeros, strict=True))
        self._precompute_positions()

    @property
    def n_bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(x.nbytes for x in (*self.keys, *self.values, *(x for pair in self.memory for x in pair)))

    def _empty(self, n_indices: int, n_rows: int | None = None) -> Tensor:
        """Return a buffer (rows, K, S, D)."""
        program = self.program
        R = n_rows or self.shape.n_slots
        K = program.n_kv_heads
        D = program.d_head
        if self.is_static:
            return torch.zeros(R, K, n_indices, D, dtype=program.dtype, device=program.device)
        # Index-major in memory, so that writing a token and moving rows are contiguous copies.
        return torch.zeros(n_indices, R, K, D, dtype=program.dtype, device=program.device).permute(1, 2, 0, 3)

    def _precompute_positions(self) -> None:
        """Compute added positions, and rotary cos and sin, for all positions."""
        program = self.program
        decoder = program.decoder
        device = program.device
        capacity = self.shape.capacity
        positions = decoder.positions
        self.position_table: Tensor | None = None
        if positions is not None and decoder.adds_positions:
            rows = min(capacity, getattr(positions, "length", capacity))
            zeros = torch.zeros(rows, program.embedding.embedding_dim, dtype=program.dtype, device=device)
            self.position_table = positions(zeros, torch.arange(rows, device=device))  # (capacity, M)
        self.rotary: dict[object, RotaryCosSin] = {
            rotary: _cos_sin_table(rotary, program, capacity)
            for layer in program.layers
            if isinstance(rotary := layer.attentions[0].rotary, Rotary)
        }

    def prompt_indices(self, rows: Tensor, positions: Tensor, from_end: Tensor, longest: int) -> PromptIndices:
        """Return where tokens are stored.

        Args:
            rows: Row of each token (N,).
            positions: Position of each token (N,).
            from_end: 1 for the last token of a prompt, 2 for the token before, … (N,).
            longest: Tokens of the longest prompt.
        """
        columns = {}
        for n_indices in {pattern.n_indices for pattern in self.patterns}:
            # A ring buffer keeps the last tokens only, so that no index is written twice.
            is_ring = longest > n_indices
            columns[n_indices] = torch.where(from_end <= n_indices, positions % n_indices, -1) if is_ring else positions
        return PromptIndices(positions, self.slots[rows] if self.is_static else rows, columns, longest)

    def write_prompts(
        self, i: int, layer: FusedAttention, indices: PromptIndices, qkv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store the keys and values of the tokens of prompts in layer `i`; return q, k and v (N, heads, D), rotated."""
        keys, values = self.keys[i], self.values[i]
        n_indices, K = self.patterns[i].n_indices, keys.shape[1]
        columns, slots = indices.columns[n_indices], indices.slots
        rotary = None if layer.rotary is None else self.rotary[layer.rotary]
        if runs_triton(qkv) and qkv.dtype != torch.float64:
            from clearhead.generation.engine.write_prompts_triton import launch

            return launch(qkv, keys, values, indices.positions, slots, columns, rotary)
        q, k, v = qkv.split((qkv.shape[1] - 2 * K, K, K), dim=1)
        if rotary is not None:
            q, k = (apply_rotary(x, rotary.at(indices.positions)) for x in (q, k))
        token = slice(None) if indices.longest <= n_indices else (columns >= 0).nonzero().squeeze(-1)
        keys[slots[token], :, columns[token]] = k[token]
        values[slots[token], :, columns[token]] = v[token]
        return q, k, v

    def begin_step(self, n_rows: int) -> None:
        """Prepare a step of the first rows: what all layers share."""
        lengths = self.lengths[:n_rows]
        self._longest = 0 if self.is_static else int(lengths.max())
        if self._longest >= self.shape.capacity:
            self._grow(self._longest + 1)
        self._rotary_now = {
            rotary: table if self.is_static else table.at(lengths) for rotary, table in self.rotary.items()
        }
        for n_indices, table in self.parents.items():
            table[:n_rows].scatter_(1, (lengths % n_indices)[:, None], self.slots[:n_rows, None].int())
        if self.memory and not self.is_static:
            self._memory_padding = self._hide_padding(self.memory_lengths[: n_rows // self.rows_per_memory])
        self._used: dict[LayerPattern, DecodeSlots] = {}
        self._is_uniform = not self.is_static and bool((lengths == lengths[:1]).all())
        for pattern in dict.fromkeys(self.patterns):
            n_indices = pattern.n_indices if self.is_static else min(self._longest + 1, pattern.n_indices)
            bias = pattern.bias(lengths[:1] if self._is_uniform else lengths, n_indices)
            if not self.is_static and not self._is_uniform:
                unused = torch.arange(n_indices, device=lengths.device) > lengths[:, None]  # (R, indices)
                bias = torch.zeros(unused.shape)[:, None] if bias is None else bias
                bias = bias.masked_fill(unused[:, None], -math.inf)
            parents = self.parents[pattern.n_indices][:n_rows] if self.parents else None
            self._used[pattern] = DecodeSlots(self.slots[:n_rows], lengths, bias, parents)

    def end_step(self, n_rows: int) -> None:
        """Count the new tokens. Rows that ended some steps ago stay at the end of their slot."""
        self.lengths[:n_rows].add_(1).clamp_(max=self._max_capacity - 1)

    def _grow(self, n_tokens: int) -> None:
        """Increase the capacity of the slots to at least `n_tokens`."""
        capacity = min(max(n_tokens, 2 * self.shape.capacity), self._max_capacity)
        self.shape = self.shape._replace(capacity=capacity)
        self.patterns = layer_patterns(self.program, capacity)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                R, _, n_used, _ = old.shape
                buffers[layer] = self._empty(self.patterns[layer].n_indices, R)
                buffers[layer][:, :, :n_used] = old  # not yet a ring buffer, or one of the same size
        self._spare.clear()
        self._precompute_positions()

    def self_attend(self, i: int, layer: FusedAttention, qkv: Tensor) -> Tensor:
        """Write the newest keys and values of layer `i`, and attend to the used part."""
        pattern, keys, values = self.patterns[i], self.keys[i], self.values[i]
        used = self._used[pattern]
        rotary = None if layer.rotary is None else self._rotary_now[layer.rotary]
        if not self.is_static or layer.head_norms is None:
            qkv = layer.normalize_heads(qkv)
        if self.is_static:
            norms = layer.head_norms
            return decode_attention(qkv, keys, values, used, rotary=rotary, norms=norms, **layer.score_options)
        R = len(qkv)
        K = keys.shape[1]
        q, k, v = qkv.split((qkv.shape[1] - 2 * K, K, K), dim=1)
        if rotary is not None:
            q = apply_rotary(q, rotary)
            k = apply_rotary(k, rotary)
        keys, values = keys[:R], values[:R]
        if self._is_uniform:
            keys[:, :, self._longest % pattern.n_indices] = k
            values[:, :, self._longest % pattern.n_indices] = v
        else:
            index = used.lengths % pattern.n_indices
            keys[self.slots[:R], :, index] = k
            values[self.slots[:R], :, index] = v
        n_used = min(self._longest + 1, pattern.n_indices)
        keys = keys[:, :, :n_used]
        values = values[:, :, :n_used]
        bias = used.bias
        never_empty = pattern.attends_to_self
        if layer.needs_naive or (bias is not None and not never_empty) or prefer_naive(q, keys, bias):
            return naive_attention(q, keys, values, bias, None, never_empty=never_empty, **layer.score_options)
        mask = None if bias is None else bias[:, :, None].to(q.dtype)
        out = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=mask, scale=layer.scale, enable_gqa=q.shape[1] != K
        )
        return out[:, :, 0]

    def write_memory(self, rows: list[int], keys_values: list[tuple[Tensor, Tensor]], lengths: Tensor) -> None:
        """Store each layer's keys and values (B, S, K, D) of encoder outputs of these lengths (B,) for these rows."""
        index = torch.tensor(rows, device=lengths.device)
        slots = self.slots[index] if self.is_static else index
        self.memory_lengths[index] = lengths
        for stored, new in zip(self.memory, keys_values, strict=True):
            for target, source in zip(stored, new, strict=True):
                target[slots, :, : source.shape[1]] = source.transpose(1, 2)

    def memory_attend(self, i: int, layer: FusedAttention, q: Tensor) -> Tensor:
        """Attend to the encoder outputs."""
        q = layer.normalize_heads(q)
        k, v = self.memory[i]
        R = len(q)
        if self.is_static:
            first = self.slots[:R]
            slots = first - first % self.rows_per_memory if self.rows_per_memory > 1 else first
            used = DecodeSlots(slots, self.memory_lengths[:R])
            return decode_attention(q, k, v, used, writes=False, **layer.score_options)
        n_prompts, (longest, bias) = R // self.rows_per_memory, self._memory_padding
        k, v = k[:n_prompts, :, :longest], v[:n_prompts, :, :longest]
        if layer.needs_naive:
            k, v = (x.repeat_interleave(self.rows_per_memory, dim=0) for x in (k, v))
            bias = None if bias is None else bias.repeat_interleave(self.rows_per_memory, dim=0)
            return naive_attention(q, k, v, bias, None, never_empty=True, **layer.score_options)
        return cross_attention(q, k, v, bias, scale=layer.scale)

    def _hide_padding(self, lengths: Tensor) -> tuple[int, Tensor | None]:
        """Return the longest length of encoder outputs (P,), and a bias (P, 1, S) if others are padded to it."""
        longest = int(lengths.max())
        hidden = torch.arange(longest) >= lengths[:, None]
        if not bool(hidden.any()):
            return longest, None
        return longest, torch.zeros(hidden.shape, dtype=self.program.dtype).masked_fill_(hidden, -math.inf)[:, None]

    def start_beams(self, width: int) -> None:
        """Let row r continue the prompt of row r − r mod width; rows of a prompt are adjacent. Static shapes only."""
        first = self.slots - self.slots % width
        self.rows_per_memory = width
        self.lengths.copy_(self.lengths[first])
        self.memory_lengths.copy_(self.memory_lengths[first])
        for n_indices in {pattern.n_indices for pattern in self.patterns}:
            start = first[:, None].expand(-1, n_indices).int()
            table = self._parent_tables.setdefault(n_indices, start.contiguous())
            table.copy_(start)
        self.parents = self._parent_tables

    def reset_rows(self) -> None:
        """Give every row its own slot again, without tokens or beams."""
        self.parents = {}
        self.rows_per_memory = 1
        self.slots.copy_(torch.arange(len(self.slots), device=self.slots.device))
        self.lengths.zero_()
        self.memory_lengths.zero_()

    def select_rows(self, rows: Tensor) -> None:
        """Make these different rows the first rows, with their slots. Static shapes only."""
        rest = torch.ones_like(self.slots, dtype=torch.bool).index_fill_(0, rows, False).nonzero().squeeze(-1)
        order = torch.cat((rows, rest))
        self.lengths[rest] = 0
        for x in (self.slots, self.lengths, self.memory_lengths):
            x.copy_(x[order])

    def reorder_beams(self, rows: Tensor) -> None:
        """Replace row i by a copy of row `rows[i]` of the same prompt, after `start_beams`."""
        for parents in self.parents.values():
            parents[: len(rows)] = parents.index_select(0, rows)

    def move_rows(self, rows: Tensor) -> None:
        """Replace row i by a copy of row `rows[i]`, and change the number of rows to that of `rows`."""
        longest = int(self.lengths[: self.n_rows].max())
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                buffers[layer] = self._move_rows(old, rows, min(longest, self.patterns[layer].n_indices))
        self.lengths = self.lengths.index_select(0, rows)
        if self.memory:
            self._move_memory(rows)
        self.n_rows = len(rows)
        self.slots = torch.arange(self.n_rows, device=self.slots.device)

    def _move_memory(self, rows: Tensor) -> None:
        """Reorder the encoder outputs as the rows; the rows of a beam share one."""
        if self.is_static:
            rows_of_memory = self.slots[rows]
            self.memory_lengths = self.memory_lengths.index_select(0, rows)
        else:
            width = len(rows) // self.n_rows
            is_multiple = len(rows) % self.n_rows == 0
            if self.rows_per_memory == 1 and width > 1 and is_multiple:
                expanded = torch.arange(self.n_rows).repeat_interleave(width)
                if torch.equal(rows, expanded):
                    self.rows_per_memory = width
                    return
            rows_of_memory = rows[:: self.rows_per_memory] // self.rows_per_memory
            if torch.equal(rows_of_memory, torch.arange(len(self.memory_lengths))):
                return
            self.memory_lengths = self.memory_lengths.index_select(0, rows_of_memory)
        self.memory = [(k.index_select(0, rows_of_memory), v.index_select(0, rows_of_memory)) for k, v in self.memory]

    def _move_rows(self, old: Tensor, rows: Tensor, n_used: int) -> Tensor:
        """Return a buffer whose row i is row `rows[i]` of `old`, reusing the buffer that the previous move freed."""
        if self.is_static:
            return old.index_select(0, self.slots[rows])
        key = old.shape[2], len(rows)
        new = self._spare.pop(key, None)
        new = self._empty(old.shape[2], len(rows)) if new is None else new
        # Used indices are contiguous.
        torch.index_select(old.permute(2, 0, 1, 3)[:n_used], 1, rows, out=new.permute(2, 0, 1, 3)[:n_used])
        self._spare = {(old.shape[2], old.shape[0]): old}
        return new


def _cos_sin_table(rotary: Rotary, program: DecoderProgram, capacity: int) -> RotaryCosSin:
    """Return the cosines and sines of a rotary embedding at all positions: rotating (1, 0) gives (cos, sin)."""
    dtype = torch.promote_types(program.dtype, torch.float32)
    n = rotary.rotary_dim(program.d_head) // 2
    unit = torch.zeros(capacity, program.d_head, dtype=dtype, device=program.device)
    unit[:, :n] = 1.0
    rotated = rotary.rotate(unit, torch.arange(capacity, device=program.device))
    return RotaryCosSin(rotated[:, :n].contiguous(), rotated[:, n : 2 * n].contiguous(), is_table=True)
