"""A static KV cache: keys and values in buffers of fixed capacity, and the bias of each decode step.

A slot is a position, or, if the mask is a window, a position modulo the window (a ring buffer). Everything that changes
between steps is a tensor (`length`) that the step itself increments, so on a GPU a step can be captured once and
replayed at every length. On the CPU nothing is captured, and only used slots are read.

Beam search reorders rows at every step. On a GPU the keys stay in place and a table of parents redirects reads; on the
CPU they are moved.

    B prompts   R rows (B times the beams)   S slots   K, H key/value and query heads   D head width   M model width
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.attention.decode import (
    DecodeSlots,
    RotaryCosSin,
    apply_rotary,
    cross_attention,
    decode_attention,
    naive_attention,
    prefer_naive,
)
from clearhead.generation.engine.program import CrossMemory, DecoderProgram, FusedAttention
from clearhead.masks import Causal, lookback
from clearhead.masks.regions import Region
from clearhead.ops.fused_linear import fused_linear_decode, fused_linear_reference

_MIN_LENGTH_FOR_KERNELS = 128  # below, generation ends before compiling the small-batch kernels pays off


class StaticKVCache:
    """Keys and values of R rows, for sequences of up to `max_length` tokens.

    With `has_static_shapes`, as on GPUs, all shapes are fixed, rows stay in place and only parents change.
    """

    def __init__(self, program: DecoderProgram, rows: int, max_length: int, *, has_static_shapes: bool) -> None:
        self.program = program
        self.rows = rows
        self.max_length = max_length
        self.has_static_shapes = has_static_shapes
        window = lookback(program.mask)
        self.n_slots = max_length if window is None else min(max_length, window)
        self.is_ring = self.n_slots < max_length
        self.left_pad: Tensor | None = None  # (R,)
        self.parents: Tensor | None = None  # (R, S)
        self.n = 0  # number of tokens, on the host
        device = program.device
        self.length = torch.zeros((), dtype=torch.int64, device=device)  # number of tokens, on the device
        self.slots = torch.arange(self.n_slots, device=device)
        self.row_index = torch.arange(rows, dtype=torch.int32, device=device)
        self.keys = [self._empty(rows) for _ in program.layers]
        self.values = [self._empty(rows) for _ in program.layers]
        self._spare: Tensor | None = None
        self.memory: list[tuple[Tensor, Tensor]] = []
        self.memory_bias: Tensor | None = None  # (B, 1, S)
        self._precompute_positions(program, max_length)
        self._linear = fused_linear_decode if max_length >= _MIN_LENGTH_FOR_KERNELS else fused_linear_reference
        self._attends_to_self = program.mask.classify(Region.nearest(0, max_length - 1, max_length)) is True

    def _empty(self, rows: int) -> Tensor:
        """Return a buffer (R, K, S, D)."""
        program = self.program
        shape = rows, program.n_kv_heads, self.n_slots, program.d_head
        if self.has_static_shapes:
            return torch.zeros(shape, dtype=program.dtype, device=program.device)
        # Slot-major in memory, so that writing a token and moving beams are contiguous copies.
        R, K, S, D = shape
        return torch.zeros(S, R, K, D, dtype=program.dtype, device=program.device).permute(1, 2, 0, 3)

    def _precompute_positions(self, program: DecoderProgram, max_length: int) -> None:
        """Compute added positions, rotary cos and sin, and position biases for all steps."""
        decoder = program.decoder
        device = program.device
        positions = decoder.positions
        self.position_table = self.cos = self.sin = self.distance_bias = None
        if positions is not None and decoder.adds_positions:
            rows = min(max_length, getattr(positions, "length", max_length))
            zeros = torch.zeros(rows, program.embedding.embedding_dim, dtype=program.dtype, device=device)
            self.position_table = positions(zeros, torch.arange(rows, device=device))  # (max_length, M)
        elif positions is not None:
            bias = positions(1, self.n_slots, self.n_slots - 1, device)[:, 0]  # (H, S); the last is at distance 0
            self.distance_bias = bias.float().flip(-1).contiguous()
        rotary = program.rotary
        if rotary is not None:
            # Rotating (1, 0) gives (cos, sin).
            dtype = torch.promote_types(program.dtype, torch.float32)
            n = rotary.rotary_dim(program.d_head) // 2
            unit = torch.zeros(max_length, program.d_head, dtype=dtype, device=device)
            unit[:, :n] = 1.0
            rotated = rotary.rotate(unit, torch.arange(max_length, device=device))
            self.cos = rotated[:, :n].contiguous()
            self.sin = rotated[:, n : 2 * n].contiguous()

    def load(
        self,
        prompt_cache: Sequence[tuple[Tensor, Tensor]],
        left_pad: Tensor | None,
        memory: CrossMemory | None,
        *,
        beams: bool,
    ) -> None:
        """Copy the keys and values (B, K, T, D) of the prompts, each for R/B rows."""
        B, T = prompt_cache[0][0].shape[0], prompt_cache[0][0].shape[2]
        self.rows_per_prompt = self.rows // B
        first = max(0, T - self.n_slots)
        slots = torch.arange(first, T, device=self.slots.device) % self.n_slots
        for layer, pair in enumerate(prompt_cache):
            for target, source in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                source = source[:, :, first:]
                if self.rows_per_prompt > 1:
                    source = source.repeat_interleave(self.rows_per_prompt, dim=0)
                target.index_copy_(2, slots, source)
        self.n = T
        self.length.fill_(T)
        repeated_pad = None if left_pad is None else left_pad.repeat_interleave(self.rows_per_prompt)
        self.left_pad = _copy_into(self.left_pad, repeated_pad)
        if memory is not None:
            if not self.memory:
                self.memory = [(k.contiguous(), v.contiguous()) for k, v in memory.keys_values]
            else:
                for (k, v), (new_k, new_v) in zip(self.memory, memory.keys_values, strict=True):
                    k.copy_(new_k)
                    v.copy_(new_v)
            self.memory_bias = _copy_into(self.memory_bias, memory.bias)
        if self.has_static_shapes and beams:
            self.parents = _copy_into(self.parents, self.row_index[:, None].expand(-1, self.n_slots).contiguous())

    def decode_step(self, ids: Tensor) -> Tensor:
        """Append one token (R,) per row and return the next logits (R, V)."""
        x, length = self.program.embed_newest(ids, self.position_table, self.length, self.left_pad)
        rotary = None
        if self.cos is not None and self.sin is not None:
            # Left padding shifts all positions of a row equally, and rotary attention depends on distances only.
            index = self.length.reshape(1)
            rotary = RotaryCosSin(F.embedding(index, self.cos), F.embedding(index, self.sin))
        slot = self.length % self.n_slots if self.is_ring else self.length
        n_used = length.clamp(max=self.n_slots) if self.is_ring else length
        if self.parents is not None:
            self.parents.index_copy_(1, slot.reshape(1), self.row_index[:, None])
        self_attend = partial(self._self_attend, DecodeSlots(slot, n_used, self._bias(), self.parents), rotary)
        logits = self.program.decode_step(x, self_attend, self._cross_attend, self._linear)
        self.length += 1
        self.n += 1
        return logits

    def _bias(self) -> Tensor | None:
        """Return the bias (R or 1, H or 1, S) added to the scores of each slot; −∞ hides a slot from a row."""
        mask = self.program.mask
        distance = None
        slots = self.slots if self.has_static_shapes else self.slots[: self.n + 1]
        if self.is_ring or self.distance_bias is not None:
            distance = (self.length - slots) % self.n_slots if self.is_ring else (self.length - slots).clamp(min=0)
        position = self.length - distance if self.is_ring and distance is not None else slots
        allowed = None
        if not isinstance(mask, Causal):
            allowed = mask.allows(self.length.expand(len(slots)), position, keys=self.max_length)[None]  # (1, S)
        if self.left_pad is not None:
            is_token = position >= self.left_pad[:, None]
            allowed = is_token if allowed is None else allowed & is_token
        if self.distance_bias is not None and distance is not None:
            bias: Tensor = self.distance_bias[:, distance][None]  # (1, H, S)
            return bias if allowed is None else bias.masked_fill(~allowed[:, None], -math.inf)
        if allowed is None:
            return None
        return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -math.inf)[:, None]

    def _self_attend(
        self, slots: DecodeSlots, rotary: RotaryCosSin | None, i: int, layer: FusedAttention, qkv: Tensor
    ) -> Tensor:
        """Write the newest keys and values of layer `i`, and attend to all."""
        keys, values = self.keys[i], self.values[i]
        if self.has_static_shapes:
            return decode_attention(qkv, keys, values, slots, scale=layer.scale, rotary=rotary)
        K = keys.shape[1]
        q, k, v = qkv.split((qkv.shape[1] - 2 * K, K, K), dim=1)
        if rotary is not None:
            q = apply_rotary(q, rotary)
            k = apply_rotary(k, rotary)
        n_used = min(self.n + 1, self.n_slots)
        slot = self.n % self.n_slots
        keys[:, :, slot] = k
        values[:, :, slot] = v
        keys, values, bias = keys[:, :, :n_used], values[:, :, :n_used], slots.bias
        if (bias is not None and not self._attends_to_self) or prefer_naive(q, keys, bias):
            return naive_attention(q, keys, values, bias, None, layer.scale, never_empty=self._attends_to_self)
        mask = None if bias is None else bias[:, :, None].to(q.dtype)
        out = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=mask, scale=layer.scale, enable_gqa=q.shape[1] != K
        )
        return out[:, :, 0]

    def _cross_attend(self, i: int, layer: FusedAttention, q: Tensor) -> Tensor:
        """Attend to the encoder outputs."""
        return cross_attention(q, *self.memory[i], self.memory_bias, scale=layer.scale)

    def reorder_cache(self, rows: Tensor) -> None:
        """Replace row i by a copy of row `rows[i]`. The beams of a prompt stay adjacent."""
        if self.parents is not None:  # static shapes: the number of rows is constant
            self.parents.copy_(self.parents.index_select(0, rows))
            return
        n_used = min(self.n, self.n_slots)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                spare = self._spare
                new = spare if spare is not None and spare.shape[0] == len(rows) else self._empty(len(rows))
                # Used slots are contiguous and are copied into the buffer that the previous copy freed.
                torch.index_select(old.permute(2, 0, 1, 3)[:n_used], 1, rows, out=new.permute(2, 0, 1, 3)[:n_used])
                buffers[layer] = new
                self._spare = old
        if self.left_pad is not None:
            self.left_pad = self.left_pad.index_select(0, rows)
        if len(rows) != self.rows or self.rows_per_prompt == 1:
            prompts = rows[:: self.rows_per_prompt] // self.rows_per_prompt
            self.memory = [(k.index_select(0, prompts), v.index_select(0, prompts)) for k, v in self.memory]
            if self.memory_bias is not None:
                self.memory_bias = self.memory_bias.index_select(0, prompts)
        self.rows = len(rows)


def _copy_into(target: Tensor | None, source: Tensor | None) -> Tensor | None:
    """Copy `source` into the memory of `target`, if any, where a captured graph reads it."""
    return source if target is None or source is None else target.copy_(source)
