"""Steps that are recorded once and replayed, and what is kept of a model between generations.

A step of a small model is a hundred short kernels, and starting them one by one takes the host longer than they run. A
recording (a CUDA graph) starts them all at once. It reads and writes the very memory it was recorded with, so it is
kept together with that memory, and is lent to one generation at a time: who finds it lent makes another."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from clearhead.generation.program import Program
from clearhead.generation.quiet import parts_of
from clearhead.models.decoder import Decoder

__all__ = ["Kept", "Reading", "Replay", "bucket", "kept_of"]

_RECORDINGS = 8  # of one model; each holds a cache, or what reading a prompt takes


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
        except RuntimeError:  # what cannot be recorded is run as it is; what went wrong otherwise does so again
            self._read = self._run
            self._read()
        return self._logits, [(k[:, :, :T], v[:, :, :T]) for k, v in self._kept]


class Kept:
    """A decoder's program and its recordings, as long as its weights are those that they were made with."""

    def __init__(self, decoder: Decoder, state: Any) -> None:
        with torch.no_grad():
            self.program = Program(decoder)
        self.state = state
        self._recordings: dict[Hashable, Any] = {}

    def take(self, key: Hashable) -> Any | None:
        """A recording that nobody has at the moment."""
        return self._recordings.pop(key, None)

    def give_back(self, key: Hashable, recording: Any) -> None:
        self._recordings[key] = recording
        while len(self._recordings) > _RECORDINGS:
            self._recordings.pop(next(iter(self._recordings)), None)


_KEPT: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()


def kept_of(decoder: Decoder) -> Kept:
    """What is kept of this decoder; made anew where its weights have changed."""
    parts = parts_of(decoder)
    state = [_identity(weight) for part in parts for weight in part._parameters.values() if weight is not None]
    kept = _KEPT.get(decoder)
    if kept is None or kept.state != state or None in state:
        kept = _KEPT[decoder] = Kept(decoder, state)
    return kept


def _identity(weight: Tensor) -> tuple[int, int, torch.dtype] | None:
    """Changes when the numbers may have; None where torch does not count changes."""
    return None if weight.is_inference() else (weight.data_ptr(), weight._version, weight.dtype)


def bucket(n: int) -> int:
    """`n` rounded up, so that few sizes are recorded: to a power of two or one and a half times one."""
    power = 1 << max(0, n - 1).bit_length()
    return 3 * power // 4 if power >= 16 and n <= 3 * power // 4 else power
