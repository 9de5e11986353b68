"""The fused decoder: runs a `DecoderProgram` over a `StaticKVCache`.

Generation uses it for models without hooks or replaced modules. The prompt is prefilled at once; the cache is allocated
at the first decode step, when the number of rows is known.

A decode step of a small model is about a hundred short kernels, and launching them takes the host longer than they run.
A CUDA graph launches them together. A captured graph reads and writes fixed memory, so it is stored together with that
memory, and is used by one generation at a time; if it is in use, another is captured. Sizes are rounded up so that
graphs are reused: rows are padded with copies of the first prompt, which finish at once.

    B prompts   R rows   T ids   V vocabulary
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from clearhead._core.shapes import Float, Int
from clearhead.generation.decoder import size_bucket
from clearhead.generation.engine.program import CrossMemory, DecoderProgram
from clearhead.generation.engine.static_cache import StaticKVCache
from clearhead.generation.prompts import UNBOUNDED_LENGTH, left_padding_kwargs, pad_rows
from clearhead.masks import Causal, padding
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.nn.modes import eval_mode, iter_modules
from clearhead.ops.cuda_graph import GraphedCallable, graphs_for, sdpa_without_cudnn

_MAX_GRAPHS = 8  # per model; each owns a cache, or the buffers of a prefill
_LONG_PROMPT = 1024  # tokens from which the speed of attention matters
_MAX_GRAPHED_PREFILL = 1 << 30  # bytes of keys and values; beyond, launches cost little, and the buffers much


def uses_cuda_graphs(device: torch.device) -> bool:
    """Return whether decode steps on this device have fixed shapes, so that CUDA graphs can be captured."""
    return device.type == "cuda"


class GraphedPrefill:
    """Prefills prompts (B, up to `width`) by one captured graph.

    Padding to the right is processed too, but the causal mask hides it.
    """

    def __init__(self, program: DecoderProgram, B: int, width: int) -> None:
        self._program = program
        device = program.device
        self._ids = torch.zeros(B, width, dtype=torch.int64, device=device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._prefill: Callable[[], None] = GraphedCallable(self._run, graphs_for(device))

    def _run(self) -> None:
        self._logits, self._keys_values = self._program.prefill(self._ids, last=self._last)

    def __call__(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the logits (B, V) after prompts (B, T), and each layer's keys and values (B, K, T, D).

        The next call overwrites this memory.
        """
        T = ids.shape[1]
        self._ids[:, :T] = ids
        self._last.fill_(T - 1)
        try:
            self._prefill()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._run()  # raises again unless only the capture failed
            self._prefill = self._run
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"prefill runs without a CUDA graph: {reason}", RuntimeWarning, stacklevel=2)
        return self._logits, [(k[:, :, :T], v[:, :, :T]) for k, v in self._keys_values]


class CompiledDecoder:
    """A decoder's program and its unused captured graphs, valid for one state of its parameters."""

    def __init__(self, decoder: Decoder, state: Any) -> None:
        with torch.no_grad():
            self.program = DecoderProgram(decoder)
        self.state = state
        self.graphs: dict[Hashable, Any] = {}  # a generation removes the graph that it uses

    def release(self, key: Hashable, graph: Any) -> None:
        """Make a captured graph available to the next generation."""
        self.graphs[key] = graph
        while len(self.graphs) > _MAX_GRAPHS:
            self.graphs.pop(next(iter(self.graphs)), None)


_COMPILED: WeakKeyDictionary[Decoder, CompiledDecoder] = WeakKeyDictionary()


def compiled_decoder(decoder: Decoder) -> CompiledDecoder:
    """Return the compiled form of a decoder; compile it again if its parameters changed or have no version counter."""
    parameters = [p for module in iter_modules(decoder) for p in module._parameters.values() if p is not None]
    state = [None if p.is_inference() else (p.data_ptr(), p._version, p.dtype) for p in parameters]
    compiled = _COMPILED.get(decoder)
    if compiled is None or compiled.state != state or None in state:
        compiled = CompiledDecoder(decoder, state)
        _COMPILED[decoder] = compiled
    return compiled


class FusedDecoder:
    """A `CapturableDecoder` for a decoder (`rows` are its prompts), or, with `source`, for an encoder-decoder."""

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        rows: Sequence[Tensor],
        max_new_tokens: int,
        source: Sequence[Tensor] | None = None,
    ) -> None:
        self.compiled = compiled_decoder(model.decoder if isinstance(model, EncoderDecoder) else model)
        self.program = self.compiled.program
        self.has_static_shapes = False
        self.n_prompts = len(rows)
        self._model = model
        self._modules = iter_modules(model)
        self._rows = rows
        self._source = source
        self._max_length = max(len(row) for row in rows) + max_new_tokens
        self._max_positions: int = getattr(self.program.decoder.positions, "length", UNBOUNDED_LENGTH)
        self._prompt_cache: list[tuple[Tensor, Tensor]] = []
        self._prefill_in_use: tuple[Hashable, GraphedPrefill] | None = None  # owns the memory of `_prompt_cache`
        self._memory: CrossMemory | None = None
        self._n_beams: int | None = None
        self.cache: StaticKVCache | None = None

    def enable_graphs(self) -> bool:
        """Use static shapes if CUDA graphs are available, and return whether they are.

        Called before `prefill` by a search that owns this decoder. Rows are padded with copies of the first.
        """
        self.has_static_shapes = uses_cuda_graphs(self.program.device)
        if self.has_static_shapes:
            extra = size_bucket(self.n_prompts) - self.n_prompts
            self._rows = [*self._rows, *[self._rows[0]] * extra]
            self._source = self._source and [*self._source, *[self._source[0]] * extra]
        return self.has_static_shapes

    def prefill(self) -> Float[Tensor, "B V"]:
        self._ids = pad_rows(self._rows, left=True).to(self.program.device)  # (B, T)
        left_pad = [self._ids.shape[1] - len(row) for row in self._rows]
        self._left_pad = torch.tensor(left_pad, device=self._ids.device) if any(left_pad) else None
        width = self._graphed_prefill_width()
        # cuDNN's attention compiles a plan per shape, which pays off for few shapes of long prompts.
        without_cudnn = sdpa_without_cudnn(self._ids.is_cuda and (width is None or width < _LONG_PROMPT))
        with eval_mode(self._modules), torch.inference_mode(), without_cudnn:
            if width is not None:
                key = ("prefill", len(self._ids), width)
                prefill = self.compiled.graphs.pop(key, None) or GraphedPrefill(self.program, len(self._ids), width)
                logits, self._prompt_cache = prefill(self._ids)
                self._prefill_in_use = key, prefill
                return logits
            if self._source is not None:
                self._encode(self._source)
            kwargs: dict[str, Any] = {}
            if self._left_pad is not None:
                adds_positions = self.program.decoder.adds_positions
                kwargs = left_padding_kwargs(self._left_pad, 0, self._ids.shape[1], adds_positions=adds_positions)
            logits, self._prompt_cache = self.program.prefill(self._ids, memory=self._memory, **kwargs)
            return logits

    def decode_step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        with torch.inference_mode(), sdpa_without_cudnn(self._ids.is_cuda and not self.has_static_shapes):
            return (self.cache or self._load_cache()).decode_step(ids)

    def reorder_cache(self, rows: Int[Tensor, " rows"]) -> None:
        with torch.inference_mode():
            (self.cache or self._load_cache()).reorder_cache(rows.to(self._ids.device))

    def expand_beams(self, width: int) -> None:
        """Repeat each prompt `width` times, after `prefill`; `reorder_cache` must not move rows between prompts."""
        self._n_beams = width

    def _graphed_prefill_width(self) -> int | None:
        """Return the width that prompts are padded to for a captured prefill, or None if it cannot be captured.

        Capturing needs prompts of one length under a causal mask.
        """
        B, T = self._ids.shape
        decoder = self.program.decoder
        width = min(max(16, size_bucket(T)), self._max_positions)
        is_plain = self._source is None and self._left_pad is None and isinstance(self.program.mask, Causal)
        is_plain = is_plain and (decoder.positions is None or decoder.adds_positions)  # a bias is planned per call
        fits = self.program.bytes_per_token * B * width <= _MAX_GRAPHED_PREFILL
        return width if self.has_static_shapes and is_plain and T and fits else None

    def start_session(self, search: Any) -> tuple[Any, Callable[[], None], Callable[[], None]]:
        """Return the search to continue with, a function to advance it, and one to end with.

        If a graph of such a search is available, the result is the captured search with the state of `search`.
        """
        if not self.has_static_shapes or search.is_over:
            return search, search.advance, self.release_prefill
        with torch.inference_mode():
            memory = self._memory and (self._memory.keys_values[0][0].shape, self._memory.bias is None)
            key = (search.key, *self._cache_sizes(), memory, self._left_pad is None)
            session = self.compiled.graphs.pop(key, None)
            if session is None:
                session = search, self._load_cache(), GraphedCallable(search.advance, graphs_for(self._ids.device))
            else:
                self._load_cache(session[1])
                session[0].copy_state_from(search)
        return session[0], session[2], lambda: self.compiled.release(key, session)

    def _cache_sizes(self) -> tuple[int, int]:
        """Return the number of rows of a cache, and its largest number of tokens."""
        max_length = self._max_length
        if self.has_static_shapes:
            max_length = max(max_length, min(max(64, size_bucket(max_length)), self._max_positions))
        return len(self._ids) * (self._n_beams or 1), max_length

    def _load_cache(self, cache: StaticKVCache | None = None) -> StaticKVCache:
        """Copy the keys and values of the prompt into `cache`, or into a new one, and use it."""
        cache = cache or StaticKVCache(self.program, *self._cache_sizes(), has_static_shapes=self.has_static_shapes)
        cache.load(self._prompt_cache, self._left_pad, self._memory, beams=self._n_beams is not None)
        self.cache = cache
        self.release_prefill()
        return cache

    def release_prefill(self) -> None:
        """Release the buffers of the prefill, once copied or not needed."""
        self._prompt_cache = []
        if self._prefill_in_use is not None:
            self.compiled.release(*self._prefill_in_use)
            self._prefill_in_use = None

    def _encode(self, rows: Sequence[Tensor]) -> None:
        """Encode the sources, padded on the right, with CUDA graphs to one of a few lengths."""
        source = pad_rows(rows).to(self.program.device)  # (B, S), or frames (B, T, F)
        lengths = torch.tensor([len(row) for row in rows], device=source.device)
        mask = padding(lengths) if len({len(row) for row in rows}) > 1 else None
        model: Any = self._model
        memory = model.encode(source, mask=mask)
        S = memory.shape[1]
        width = max(16, size_bucket(S)) if self.has_static_shapes and source.dim() == 2 else S
        if width > S:
            mask = padding(lengths)
            memory = torch.nn.functional.pad(memory, (0, 0, 0, width - S))
        bias = None
        if mask is not None:
            hidden = torch.arange(width, device=source.device) >= lengths[:, None]
            bias = memory.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None]  # (B, 1, S)
        self._memory = self.program.cross_memory(memory, mask, bias)
