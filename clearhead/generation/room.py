"""Where a `Program` keeps keys and values: buffers of a fixed number of places, and which of them a token sees.

A place is a position, or, where the mask is a window, a position modulo the window, so that the window is all that is
kept. Everything that changes from step to step is a tensor (`length`) that the step itself moves on: on a GPU a step
can be recorded once and replayed at every length. On the CPU nothing is recorded, and only the places in use are read.

Beams change places at every step. On a GPU their keys stay where they are and a table of parents says where to look; on
the CPU they are moved.

    B prompts   R rows (B times the beams)   S places   K, H key/value and query heads   D head width   M model width"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.attention.kernels.decode import Places, Turn, attend_memory, attend_newest, few, turned, weighed
from clearhead.generation.program import Attention, Memory, Program
from clearhead.layers.few_rows import few_rows, few_rows_reference
from clearhead.masks import Causal, lookback
from clearhead.masks.geometry import Region

_WORTH_COMPILING = 128  # places from which on kernels for few rows are used: a short text is over before they are there


class Room:
    """Keys and values of R rows, for sequences of up to `limit` tokens.

    `recordable`: all shapes are fixed, rows keep their places and only parents change; the way of GPUs."""

    def __init__(self, program: Program, rows: int, limit: int, *, recordable: bool) -> None:
        self.program, self.rows, self.limit, self.recordable = program, rows, limit, recordable
        window = lookback(program.mask)
        self.places = limit if window is None else min(limit, window)
        self.rings = self.places < limit
        self.before: Tensor | None = None  # (R,) padding in front of each row
        self.parents: Tensor | None = None  # (R, S)
        self.n = 0  # how many tokens there are, as the host counts
        device = program.device
        self.length = torch.zeros((), dtype=torch.int64, device=device)  # the same, on the device
        self.place = torch.arange(self.places, device=device)
        self.own = torch.arange(rows, dtype=torch.int32, device=device)
        self.keys, self.values = ([self._empty(rows) for _ in program.layers] for _ in range(2))
        self._spare: Tensor | None = None
        self.memory: list[tuple[Tensor, Tensor]] = []
        self.memory_bias: Tensor | None = None  # (B, 1, S)
        self._tables(program, limit)
        self._multiply = few_rows if limit >= _WORTH_COMPILING else few_rows_reference
        self._sees_itself = program.mask.classify(Region.nearest(0, limit - 1, limit)) is True

    def _empty(self, rows: int) -> Tensor:
        program = self.program
        sizes = rows, program.n_kv_heads, self.places, program.d_head
        if self.recordable:
            return torch.zeros(sizes, dtype=program.dtype, device=program.device)
        # Place by place in memory: a token is written, and beams are moved, in one piece.
        R, K, S, D = sizes
        return torch.zeros(S, R, K, D, dtype=program.dtype, device=program.device).permute(1, 2, 0, 3)

    def _tables(self, program: Program, limit: int) -> None:
        """Positions for every step at once: rows to add, turns, and the bias of every distance."""
        decoder, device = program.decoder, program.device
        positions = decoder.positions
        self.added = self.cos = self.sin = self.bias_at = None
        if positions is not None and decoder.adds_positions:
            rows = min(limit, getattr(positions, "length", limit))
            nothing = torch.zeros(rows, program.embedding.embedding_dim, dtype=program.dtype, device=device)
            self.added = positions(nothing, torch.arange(rows, device=device))  # (limit, M)
        elif positions is not None:
            bias = positions(1, self.places, self.places - 1, device)[:, 0]  # (H, S): the last is at distance 0
            self.bias_at = bias.float().flip(-1).contiguous()
        if (rotary := program.rotary) is not None:
            # What a turn makes of (1, 0) is its cosine and its sine.
            wide = torch.promote_types(program.dtype, torch.float32)
            n = rotary.turned_width(program.d_head) // 2
            probe = torch.zeros(limit, program.d_head, dtype=wide, device=device)
            probe[:, :n] = 1.0
            turn = rotary.rotate(probe, torch.arange(limit, device=device))
            self.cos, self.sin = turn[:, :n].contiguous(), turn[:, n : 2 * n].contiguous()

    def load(
        self, kept: Sequence[tuple[Tensor, Tensor]], before: Tensor | None, memory: Memory | None, *, beams: bool
    ) -> None:
        """Takes over what reading the prompt has made: keys and values (B, K, T, D), each for R/B rows."""
        B, T = kept[0][0].shape[0], kept[0][0].shape[2]
        self.share = self.rows // B
        first = max(0, T - self.places)
        where = torch.arange(first, T, device=self.place.device) % self.places
        for layer, pair in enumerate(kept):
            for mine, given in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                given = given[:, :, first:]
                mine.index_copy_(2, where, given if self.share == 1 else given.repeat_interleave(self.share, dim=0))
        self.n = T
        self.length.fill_(T)
        self.before = _into(self.before, None if before is None else before.repeat_interleave(self.share))
        if memory is not None:
            if not self.memory:
                self.memory = [(k.contiguous(), v.contiguous()) for k, v in memory.kept]
            else:
                for (k, v), (new_k, new_v) in zip(self.memory, memory.kept, strict=True):
                    k.copy_(new_k), v.copy_(new_v)
            self.memory_bias = _into(self.memory_bias, memory.bias)
        if self.recordable and beams:
            self.parents = _into(self.parents, self.own[:, None].expand(-1, self.places).contiguous())

    def step(self, ids: Tensor) -> Tensor:
        """The logits (R, V) after one more token (R,) a row."""
        x, used = self.program.enter(ids, self.added, self.length, self.before)
        turn = None
        if self.cos is not None and self.sin is not None:
            # Padding in front moves a whole row alike, and turns speak of distances only.
            at = self.length.reshape(1)
            turn = Turn(F.embedding(at, self.cos), F.embedding(at, self.sin))
        slot = self.length % self.places if self.rings else self.length
        count = used.clamp(max=self.places) if self.rings else used
        if self.parents is not None:
            self.parents.index_copy_(1, slot.reshape(1), self.own[:, None])
        attend = partial(self._attend, Places(slot, count, self._bias(), self.parents), turn)
        logits = self.program.step(x, attend, self._attend_memory, self._multiply)
        self.length += 1
        self.n += 1
        return logits

    def _bias(self) -> Tensor | None:
        """(R or 1, H or 1, S): what is added to the scores of each place, −∞ where a row does not see it."""
        mask, distance = self.program.mask, None
        place = self.place if self.recordable else self.place[: self.n + 1]
        if self.rings or self.bias_at is not None:
            distance = (self.length - place) % self.places if self.rings else (self.length - place).clamp(min=0)
        position = self.length - distance if self.rings and distance is not None else place
        allowed = None
        if not isinstance(mask, Causal):
            allowed = mask.allows(self.length.expand(len(place)), position, keys=self.limit)[None]  # (1, S)
        if self.before is not None:
            real = position >= self.before[:, None]
            allowed = real if allowed is None else allowed & real
        if self.bias_at is not None and distance is not None:
            bias = self.bias_at[:, distance][None]  # (1, H, S)
            return bias if allowed is None else bias.masked_fill(~allowed[:, None], -math.inf)
        if allowed is None:
            return None
        return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -math.inf)[:, None]

    def _attend(self, now: Places, turn: Turn | None, layer: int, part: Attention, qkv: Tensor) -> Tensor:
        keys, values, scale = self.keys[layer], self.values[layer], part.scale
        if self.recordable:
            return attend_newest(qkv, keys, values, now, scale=scale, turn=turn)
        K = keys.shape[1]
        q, k, v = qkv.split((qkv.shape[1] - 2 * K, K, K), dim=1)
        if turn is not None:
            q, k = turned(q, turn), turned(k, turn)
        used, slot = min(self.n + 1, self.places), self.n % self.places
        keys[:, :, slot], values[:, :, slot] = k, v
        keys, values, bias = keys[:, :, :used], values[:, :, :used], now.bias
        if (bias is not None and not self._sees_itself) or few(q, keys, bias):
            return weighed(q, keys, values, bias, None, scale, never_empty=self._sees_itself)
        mask = None if bias is None else bias[:, :, None].to(q.dtype)
        out = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != K
        )
        return out[:, :, 0]

    def _attend_memory(self, layer: int, part: Attention, q: Tensor) -> Tensor:
        return attend_memory(q, *self.memory[layer], self.memory_bias, scale=part.scale)

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was. Of beams, those of one prompt stay together."""
        if self.parents is not None:  # of a recording, whose rows are always as many
            self.parents.copy_(self.parents.index_select(0, rows))
            return
        used = min(self.n, self.places)
        for kept in (self.keys, self.values):
            for layer, old in enumerate(kept):
                spare = self._spare
                new = spare if spare is not None and spare.shape[0] == len(rows) else self._empty(len(rows))
                # What is in use lies in one piece, and goes straight to its place in a buffer that was left before.
                torch.index_select(old.permute(2, 0, 1, 3)[:used], 1, rows, out=new.permute(2, 0, 1, 3)[:used])
                kept[layer], self._spare = new, old
        if self.before is not None:
            self.before = self.before.index_select(0, rows)
        if len(rows) != self.rows or self.share == 1:
            prompts = rows[:: self.share] // self.share
            self.memory = [(k.index_select(0, prompts), v.index_select(0, prompts)) for k, v in self.memory]
            if self.memory_bias is not None:
                self.memory_bias = self.memory_bias.index_select(0, prompts)
        self.rows = len(rows)


def _into(mine: Tensor | None, new: Tensor | None) -> Tensor | None:
    """`new`, in the memory of `mine` where there is one: a recording, which has the same shapes, reads it there."""
    return new if mine is None or new is None else mine.copy_(new)
