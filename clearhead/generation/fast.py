"""The fast way to step: a `Program` over a `Room`. It is what generation takes for a model that nobody watches.

The prompt is read at once; the room is made at the first step, when it is known how many rows there are.

A step of a small model is a hundred short kernels, and starting them one by one takes the host longer than they run. A
recording (a CUDA graph) starts them all at once. It reads and writes the very memory it was recorded with, so it is
kept together with that memory, and is lent to one generation at a time: who finds it lent makes another. Sizes are
rounded up, so that a recording serves again: rows are filled up with copies of the first prompt, which end at once.

    B prompts   R rows   T ids   V vocabulary"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead._shapes import Float, Int
from clearhead.generation.program import Memory, Program
from clearhead.generation.prompts import EVERYTHING_AFTER, beside, padded
from clearhead.generation.quiet import evaluating, parts_of
from clearhead.generation.room import Room
from clearhead.masks import Causal, padding
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder

_RECORDINGS = 8  # of one model; each holds a cache, or what reading a prompt takes
_LONG = 1024  # tokens from which on attention counts
_READ_AT_ONCE = 1 << 30  # bytes of keys and values; beyond, starting kernels costs nothing, and keeping them much


def records(device: torch.device) -> bool:
    """Whether steps on this device are of fixed shapes, to be recorded: where starting them is what takes long."""
    return device.type == "cuda"


def bucket(n: int) -> int:
    """`n` rounded up, so that few sizes are recorded: to a power of two or one and a half times one."""
    power = 1 << max(0, n - 1).bit_length()
    return 3 * power // 4 if power >= 16 and n <= 3 * power // 4 else power


def _quick_kernels(wanted: bool) -> AbstractContextManager[None]:
    """Without cuDNN's attention, which prepares itself anew for every length: prompts come in all of them."""
    quick = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(quick) if wanted else nullcontext()


class Replay:
    """Calls `run`, which must work on the same memory every time; on a GPU from the second call on by replaying it."""

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        self._run, self._device = run, device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self._calls += 1
        if self._device.type != "cuda" or self._calls == 1:  # compilers and libraries prepare themselves in the first
            self._run()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._run()
        self._graph.replay()


class Reading:
    """Prompts (B, up to `width`) read by one recording. What is to their right is read too: no token sees it."""

    def __init__(self, program: Program, B: int, width: int) -> None:
        self._program, device = program, program.device
        self._ids = torch.zeros(B, width, dtype=torch.int64, device=device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._read: Callable[[], None] = Replay(self._run, device)

    def _run(self) -> None:
        self._logits, self._kept = self._program.read(self._ids, last=self._last)

    def __call__(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The logits (B, V) after the prompts (B, T), and each layer's keys and values (B, K, T, D): all in memory that
        the next reading writes to again."""
        T = ids.shape[1]
        self._ids[:, :T] = ids
        self._last.fill_(T - 1)
        try:
            self._read()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._run()  # raises again unless only the capture failed
            self._read = self._run
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"prefill runs without a CUDA graph: {reason}", RuntimeWarning, stacklevel=2)
        return self._logits, [(k[:, :, :T], v[:, :, :T]) for k, v in self._kept]


class Kept:
    """A decoder's program and its recordings, as long as its weights are those that they were made with."""

    def __init__(self, decoder: Decoder, state: Any) -> None:
        with torch.no_grad():
            self.program = Program(decoder)
        self.state = state
        self.recordings: dict[Hashable, Any] = {}  # that nobody has at the moment: who takes one takes it out

    def give_back(self, key: Hashable, recording: Any) -> None:
        self.recordings[key] = recording
        while len(self.recordings) > _RECORDINGS:
            self.recordings.pop(next(iter(self.recordings)), None)


_KEPT: WeakKeyDictionary[Decoder, Kept] = WeakKeyDictionary()


def kept_of(decoder: Decoder) -> Kept:
    """What is kept of this decoder; made anew where its weights have changed, or torch does not count changes."""
    weights = [weight for part in parts_of(decoder) for weight in part._parameters.values() if weight is not None]
    state = [None if w.is_inference() else (w.data_ptr(), w._version, w.dtype) for w in weights]
    kept = _KEPT.get(decoder)
    if kept is None or kept.state != state or None in state:
        kept = _KEPT[decoder] = Kept(decoder, state)
    return kept


class Fast:
    """A stepper for a decoder (`rows` are its prompts), or with `source` for the writing half of an encoder-decoder."""

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        rows: Sequence[Tensor],
        max_new: int,
        source: Sequence[Tensor] | None = None,
    ) -> None:
        self.kept = kept_of(model.decoder if isinstance(model, EncoderDecoder) else model)
        self.program = self.kept.program
        self.recordable = False
        self.n_prompts = len(rows)
        self._model, self._parts, self._rows, self._source = model, parts_of(model), rows, source
        self._limit = max(len(row) for row in rows) + max_new
        self._longest: int = getattr(self.program.decoder.positions, "length", EVERYTHING_AFTER)
        self._kept_tokens: list[tuple[Tensor, Tensor]] = []
        self._lent: tuple[Hashable, Reading] | None = None  # whose memory those tokens are in
        self._memory: Memory | None = None
        self._beams: int | None = None  # rows that each prompt has in a beam search
        self.room: Room | None = None

    def record(self) -> bool:
        """Whether steps are recorded, asked before `begin` by a search that has this stepper to itself. Rows are then
        filled up with copies of the first."""
        self.recordable = records(self.program.device)
        if self.recordable:
            extra = bucket(self.n_prompts) - self.n_prompts
            self._rows = [*self._rows, *[self._rows[0]] * extra]
            self._source = self._source and [*self._source, *[self._source[0]] * extra]
        return self.recordable

    def begin(self) -> Float[Tensor, "B V"]:
        self._ids = padded(self._rows, left=True).to(self.program.device)  # (B, T)
        before = [self._ids.shape[1] - len(row) for row in self._rows]
        self._before = torch.tensor(before, device=self._ids.device) if any(before) else None
        width = self._recorded_width()
        # cuDNN's attention prepares itself for a shape; that pays where there are few of them, for long prompts.
        quick = _quick_kernels(self._ids.is_cuda and (width is None or width < _LONG))
        with evaluating(self._parts), torch.inference_mode(), quick:
            if width is not None:
                key = ("reading", len(self._ids), width)
                reading = self.kept.recordings.pop(key, None) or Reading(self.program, len(self._ids), width)
                logits, self._kept_tokens = reading(self._ids)
                self._lent = key, reading
                return logits
            if self._source is not None:
                self._read_source(self._source)
            how: dict[str, Any] = {}
            if self._before is not None:
                how = beside(self._before, 0, self._ids.shape[1], adds_positions=self.program.decoder.adds_positions)
            logits, self._kept_tokens = self.program.read(self._ids, memory=self._memory, **how)
            return logits

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        with torch.inference_mode(), _quick_kernels(self._ids.is_cuda and not self.recordable):
            return (self.room or self._settled()).step(ids)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        with torch.inference_mode():
            (self.room or self._settled()).reorder(rows.to(self._ids.device))

    def branch(self, width: int) -> None:
        """Every prompt becomes `width` rows, which `reorder` keeps together. Called once, after `begin`."""
        self._beams = width

    def _recorded_width(self) -> int | None:
        """How long prompts are rounded up to where reading them is recorded: of one length, each token seeing what is
        before it alone."""
        (B, T), decoder = self._ids.shape, self.program.decoder
        width = min(max(16, bucket(T)), self._longest)
        plain = self._source is None and self._before is None and isinstance(self.program.mask, Causal)
        plain = plain and (decoder.positions is None or decoder.adds_positions)  # a bias is planned for, call by call
        small = self.program.bytes_per_token * B * width <= _READ_AT_ONCE
        return width if self.recordable and plain and T and small else None

    def session(self, search: Any) -> tuple[Any, Callable[[], None], Callable[[], None]]:
        """The search (a `walk.Search`) to go on with, how to advance it, and what to call when it is left.

        Where a recording of such a search is at hand, it is that one, with the state of `search` in its memory."""
        if not self.recordable or search.is_over:
            return search, search.advance, self.give_back
        with torch.inference_mode():
            memory = self._memory and (self._memory.kept[0][0].shape, self._memory.bias is None)
            key = (search.key, *self._sizes(), memory, self._before is None)
            found = self.kept.recordings.pop(key, None)
            if found is None:
                found = search, self._settled(), Replay(search.advance, self._ids.device)
            else:
                self._settled(found[1])
                found[0].take_over(search)
        return found[0], found[2], lambda: self.kept.give_back(key, found)

    def _sizes(self) -> tuple[int, int]:
        """How many rows a room has, and tokens at most."""
        limit = self._limit
        if self.recordable:
            limit = max(limit, min(max(64, bucket(limit)), self._longest))
        return len(self._ids) * (self._beams or 1), limit

    def _settled(self, room: Room | None = None) -> Room:
        """The room, a new one if none is given, with what was read in it."""
        room = room or Room(self.program, *self._sizes(), recordable=self.recordable)
        room.load(self._kept_tokens, self._before, self._memory, beams=self._beams is not None)
        self.room = room
        self.give_back()
        return room

    def give_back(self) -> None:
        """What the prompt's reading is kept in, once it is copied or not wanted."""
        self._kept_tokens = []
        if self._lent is not None:
            self.kept.give_back(*self._lent)
            self._lent = None

    def _read_source(self, rows: Sequence[Tensor]) -> None:
        """The encoder reads the sources, padded on the right; a few lengths only where steps are recorded."""
        source = padded(rows).to(self.program.device)  # (B, S), or frames (B, T, F)
        lengths = torch.tensor([len(row) for row in rows], device=source.device)
        mask = padding(lengths) if len({len(row) for row in rows}) > 1 else None
        model: Any = self._model
        memory = model.encode(source, mask=mask)
        S = memory.shape[1]
        room = max(16, bucket(S)) if self.recordable and source.dim() == 2 else S  # recordings have one length
        if room > S:
            mask, memory = padding(lengths), torch.nn.functional.pad(memory, (0, 0, 0, room - S))
        bias = None
        if mask is not None:
            hidden = torch.arange(room, device=source.device) >= lengths[:, None]
            bias = memory.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None]  # (B, 1, S)
        self._memory = self.program.remember(memory, mask, bias)
