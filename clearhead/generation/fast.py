"""The fast way to step: a `Program` over a `Room`. It is what generation takes for a model that nobody watches.

The prompt is read at once; the room is made at the first step, when it is known how many rows there are. On a GPU sizes
are rounded up, so that a recording serves again: rows are filled up with copies of the first prompt, which end at once.

    B prompts   R rows   T ids   V vocabulary"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from clearhead._shapes import Float, Int
from clearhead.generation.program import Memory, quick_kernels
from clearhead.generation.prompts import padded, sources_of
from clearhead.generation.quiet import evaluating, parts_of
from clearhead.generation.recorded import Kept, Reading, Replay, bucket
from clearhead.generation.room import Room
from clearhead.masks import Causal, padding

__all__ = ["EVERYTHING_AFTER", "Fast", "Search"]

_LONG = 1024  # tokens from which on attention counts
_READ_AT_ONCE = 1 << 30  # bytes of keys and values; beyond, starting kernels costs nothing, and keeping them much
EVERYTHING_AFTER = 2**31 - 1  # a length that no sequence reaches: padding(…) then hides what comes before, and no more


def records(device: torch.device) -> bool:
    """Whether steps on this device are of fixed shapes, to be recorded: on a GPU, where starting them is what
    takes long."""
    return device.type == "cuda"


@runtime_checkable
class Search(Protocol):
    """A search in progress whose state is tensors that `advance` changes in place."""

    def advance(self) -> None: ...

    def tensors(self) -> list[Tensor]: ...


class Fast:
    """A stepper for a decoder (`rows` are its prompts) or, with `source`, for the writing half of
    an encoder-decoder."""

    def __init__(
        self,
        model: nn.Module,
        kept: Kept,
        rows: Sequence[Tensor],
        max_new: int,
        *,
        source: Sequence[Tensor] | None = None,
        alone: bool = True,
    ) -> None:
        self.kept, self.program = kept, kept.program
        self.recordable = alone and records(self.program.device)
        self.n_prompts = len(rows)
        extra = bucket(len(rows)) - len(rows) if self.recordable else 0
        rows = [*rows, *[rows[0]] * extra]
        self._model, self._parts = model, parts_of(model)
        self._ids = padded(rows, left=True).to(self.program.device)  # (B, T)
        T = self._ids.shape[1]
        before = [T - len(row) for row in rows]
        self._before = torch.tensor(before, device=self._ids.device) if any(before) else None
        self._source = None if source is None else [*source, *[source[0]] * extra]
        self._limit = T + max_new
        self._kept_tokens: list[tuple[Tensor, Tensor]] = []
        self._lent: tuple[Hashable, Reading] | None = None  # whose memory those tokens are in
        self._memory: Memory | None = None
        self._memory_bias: Tensor | None = None
        self._share, self._beams = 1, False
        self.room: Room | None = None

    # ------------------------------------------------------------------ the three methods of a stepper

    def begin(self) -> Float[Tensor, "B V"]:
        quick = quick_kernels() if self._ids.is_cuda else nullcontext()
        if width := self._recorded_width():
            # cuDNN's attention prepares itself for a shape; that pays where there are few of them, for long prompts.
            with evaluating(self._parts), torch.inference_mode(), quick if width < _LONG else nullcontext():
                key = ("reading", len(self._ids), width)
                reading = self.kept.take(key) or Reading(self.program, len(self._ids), width)
                logits, self._kept_tokens = reading(self._ids)
                self._lent = key, reading
                return logits
        with evaluating(self._parts), torch.inference_mode(), quick:
            if self._source is not None:
                self._read_source(self._source)
            mask = positions = None
            if self._before is not None:
                mask = padding(torch.full_like(self._before, EVERYTHING_AFTER), before=self._before)
                if self.program.decoder.adds_positions:
                    place = torch.arange(self._ids.shape[1], device=self._ids.device)
                    positions = (place - self._before[:, None]).clamp(min=0)  # padding's are never seen
            logits, self._kept_tokens = self.program.read(
                self._ids, mask=mask, positions=positions, memory=self._memory
            )
            return logits

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        quick = quick_kernels() if self._ids.is_cuda and not self.recordable else nullcontext()
        with torch.inference_mode(), quick:
            if self.room is None:
                self._settle(self._new_room())
            assert self.room is not None
            return self.room.step(ids)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        with torch.inference_mode():
            if self.room is not None:
                self.room.reorder(rows.to(self._ids.device))
                return
            rows = rows.to(self._ids.device)
            self._kept_tokens = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self._kept_tokens]
            self._before = None if self._before is None else self._before.index_select(0, rows)
            if self._memory is not None:
                pairs = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self._memory.kept]
                self._memory = Memory(pairs, None)
                if self._memory_bias is not None:
                    self._memory_bias = self._memory_bias.index_select(0, rows)

    def branch(self, width: int) -> None:
        """Every prompt becomes `width` rows, which `reorder` keeps together. Called once, after `begin`."""
        self._share, self._beams = width, True

    # ------------------------------------------------------------------ rooms and recordings

    def _recorded_width(self) -> int | None:
        """How long prompts are rounded up to where reading them is recorded: of one length, each token seeing what is
        before it alone."""
        (B, T), decoder = self._ids.shape, self.program.decoder
        longest = getattr(decoder.positions, "length", None)
        width = max(16, bucket(T)) if longest is None else min(max(16, bucket(T)), longest)
        plain = self._source is None and self._before is None and isinstance(self.program.mask, Causal)
        plain = plain and (decoder.positions is None or decoder.adds_positions)  # a bias is planned for, call by call
        small = self.program.bytes_per_token * B * width <= _READ_AT_ONCE
        return width if self.recordable and plain and T and small else None

    def session(self, key: Hashable, search: Search) -> tuple[Search, Callable[[], None], Callable[[], None]]:
        """The search to go on with, how to advance it, and what to call when it is over.

        Where a recording of such a search is at hand, it is that one, with the state of `search` put into its memory.
        """
        if not self.recordable:
            return search, search.advance, lambda: None
        with torch.inference_mode():
            room = self._new_room(make=False)
            key = (key, *room)
            found = self.kept.take(key)
            if found is None:
                self._settle(self._new_room())
                found = (search, self.room, Replay(search.advance, self._ids.device))
            else:
                self._settle(found[1])
                for mine, given in zip(found[0].tensors(), search.tensors(), strict=True):
                    mine.copy_(given)
        return found[0], found[2], lambda: self.kept.give_back(key, found)

    def _new_room(self, *, make: bool = True) -> Any:
        """A room for what was read, or only its sizes."""
        rows = self._ids.shape[0] if not self._kept_tokens else self._kept_tokens[0][0].shape[0]
        rows, limit = rows * self._share, self._limit
        if self.recordable:
            limit = max(64, bucket(limit))
            longest = getattr(self.program.decoder.positions, "length", None)
            if longest is not None:
                limit = max(self._limit, min(limit, longest))
        if not make:
            shape = None if self._memory is None else tuple(self._memory.kept[0][0].shape)
            return rows, limit, shape, self._before is None, self._memory_bias is None
        return Room(self.program, rows, limit, limit, recordable=self.recordable)

    def _settle(self, room: Room) -> None:
        room.load(
            self._kept_tokens,
            before=self._before,
            memory=self._memory,
            memory_bias=self._memory_bias,
            beams=self._beams,
        )
        self.room = room
        self.give_back()

    def give_back(self) -> None:
        """What the prompt's reading is kept in, once it is copied or not wanted."""
        self._kept_tokens = []
        if self._lent is not None:
            self.kept.give_back(*self._lent)
            self._lent = None

    def _read_source(self, rows: Sequence[Tensor]) -> None:
        """The encoder reads the sources, padded on the right; a few lengths only where steps are recorded."""
        source = sources_of(rows).to(self.program.device)  # (B, S), or frames (B, T, F)
        lengths = torch.tensor([len(row) for row in rows], device=source.device)
        mask = padding(lengths) if len({len(row) for row in rows}) > 1 else None
        model: Any = self._model
        memory = model.encode(source, mask=mask)
        S = memory.shape[1]
        room = max(16, bucket(S)) if self.recordable and source.dim() == 2 else S  # recordings have one length
        if room > S:
            mask, memory = padding(lengths), torch.nn.functional.pad(memory, (0, 0, 0, room - S))
        self._memory = self.program.remember(memory, mask)
        self._memory_bias = None
        if mask is not None:
            hidden = torch.arange(room, device=source.device) >= lengths[:, None]
            self._memory_bias = memory.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None]  # (B, 1, S)
