"""`SlotDecoder`: decodes the prompts of one request in the slots of a `StaticKVCache`.

Prompts are prefilled into rows at any time (continuous batching), and a step adds one token to each of the first rows.
On a GPU the cache, the state of the search and the captured CUDA graphs form a `DecodeSession`, which is stored with
the model and used by one request at a time; if it is in use, another is created. A graph depends on the batch bucket
and on the kind of search, and on nothing else of a request.

    B prompts   R rows   V vocabulary
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.caches import CACHES
from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import runs_triton
from clearhead.errors import ConfigError
from clearhead.generation.decoder import batch_bucket, size_bucket, state_tensors
from clearhead.generation.engine.prefill import encode, prefill
from clearhead.generation.engine.program import Attends, DecoderProgram
from clearhead.generation.engine.static_cache import CacheShape, StaticKVCache
from clearhead.generation.request import Slots
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.nn.modes import eval_mode, iter_modules
from clearhead.ops.cuda_graph import graphs_for
from clearhead.ops.fused_linear import apply_norm, fused_linear_decode
from clearhead.ops.sdpa_backends import sdpa_without_cudnn

_State = TypeVar("_State")
_MAX_SLOTS = {"cuda": 128, "cpu": 512}  # default number of rows of a batch
_MEMORY_FRACTION = 0.8  # of the free memory of a device, for keys and values
_MIN_CAPACITY = 256  # tokens per slot, so that short requests share a session
_FORCE_STATIC: contextvars.ContextVar[bool] = contextvars.ContextVar("force_static_shapes", default=False)


@contextmanager
def static_shapes() -> Iterator[None]:
    """Use the fixed shapes of a GPU on every device, to test them."""
    token = _FORCE_STATIC.set(True)
    try:
        yield
    finally:
        _FORCE_STATIC.reset(token)


class DecodeSession:
    """A cache, and the states and captured graphs of the searches that ran over it."""

    def __init__(self, program: DecoderProgram, shape: CacheShape, *, is_static: bool) -> None:
        self.cache = StaticKVCache(program, shape, is_static=is_static)
        self.states: dict[Hashable, Any] = {}
        self.graphs: dict[Hashable, Callable[[], None] | None] = {}  # None: to be captured at the next call
        self.is_reusable = is_static


ParameterState: TypeAlias = list[tuple[int, int, torch.dtype] | None]
"""Address, version and dtype of each parameter; None for parameters without a version counter."""


class CompiledDecoder:
    """A decoder's program and its unused sessions, valid for one state of its parameters."""

    def __init__(self, decoder: Decoder, state: ParameterState) -> None:
        with torch.no_grad():
            self.program = DecoderProgram(decoder)
        self.state = state
        self.sessions: list[DecodeSession] = []

    def acquire(self, shape: CacheShape, *, is_static: bool) -> DecodeSession:
        """Return an unused session that is large enough, or a new one in place of the unused ones."""
        for session in self.sessions:
            if session.cache.is_static == is_static and session.cache.shape.covers(shape):
                self.sessions.remove(session)
                return session
        if is_static and self.sessions:
            shape = CacheShape(*map(max, shape, *(session.cache.shape for session in self.sessions)))
        self.sessions.clear()
        return DecodeSession(self.program, shape, is_static=is_static)

    def release(self, session: DecodeSession) -> None:
        """Make a session available to the next request."""
        if session.is_reusable and len(self.sessions) < 2:
            self.sessions.append(session)


_COMPILED: WeakKeyDictionary[Decoder, CompiledDecoder] = WeakKeyDictionary()
CACHES.register(_COMPILED.clear)


def compiled_decoder(decoder: Decoder) -> CompiledDecoder:
    """Return the compiled form of a decoder; compile it again if its parameters changed or have no version counter."""
    parameters = [p for module in iter_modules(decoder) for p in module._parameters.values() if p is not None]
    state = [None if p.is_inference() else (p.data_ptr(), p._version, p.dtype) for p in parameters]
    compiled = _COMPILED.get(decoder)
    if compiled is None or compiled.state != state or None in state:
        compiled = CompiledDecoder(decoder, state)
        _COMPILED[decoder] = compiled
    return compiled


class SlotDecoder:
    """A `ContinuousDecoder` for a decoder, or, with `sources`, for an encoder-decoder.

    Args:
        model: The model.
        prompts: Ids that each row continues.
        max_new_tokens: Largest number of new ids.
        sources: Inputs of the encoder.
        slots: Largest number of rows; "auto" for as many as fit into memory, at most 128 (512 on a CPU).
    """

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        prompts: Sequence[Tensor],
        max_new_tokens: int,
        sources: Sequence[Tensor] | None = None,
        *,
        slots: Slots = "auto",
    ) -> None:
        self.compiled = compiled_decoder(model.decoder if isinstance(model, EncoderDecoder) else model)
        self.program = self.compiled.program
        self.is_static = self.program.device.type == "cuda" or _FORCE_STATIC.get()
        self.n_prompts = len(prompts)
        self._model = model
        self._modules = iter_modules(model)
        self._prompts = prompts
        self._sources = sources
        self._slots = slots
        max_positions = getattr(self.program.decoder.positions, "length", None)
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        self._capacity: int = longest if max_positions is None else min(longest, max_positions)
        if self.is_static:
            bucket = max(_MIN_CAPACITY, size_bucket(self._capacity))
            self._capacity = max(self._capacity, bucket if max_positions is None else min(bucket, max_positions))
        self._session: DecodeSession | None = None

    def reserve_rows(self) -> tuple[int, int]:
        """Allocate the cache, and return how many prompts are decoded at once, and the number of slots."""
        n_rows = min(self.n_prompts, self.max_rows)  # once: it queries the device, and the cache takes memory
        n_slots = self._get_session(n_rows, can_shrink=self._slots == "auto").cache.shape.n_slots
        return min(n_rows, n_slots), n_slots

    def subset(self, prompts: range) -> SlotDecoder:
        """Return a decoder for some of the prompts."""
        copy = SlotDecoder.__new__(SlotDecoder)
        vars(copy).update(vars(self))
        copy._prompts = [self._prompts[i] for i in prompts]
        copy._sources = None if self._sources is None else [self._sources[i] for i in prompts]
        copy.n_prompts = len(prompts)
        return copy

    @property
    def max_rows(self) -> int:
        """Largest number of rows, if there are enough prompts."""
        if self._slots != "auto":
            return self._slots
        return max(1, min(_MAX_SLOTS[self.program.device.type], self._slots_that_fit(self._capacity)))

    @property
    def cache(self) -> StaticKVCache:
        """The cache of this request."""
        return self._get_session().cache

    def _get_session(self, n_rows: int = 1, *, can_shrink: bool = False) -> DecodeSession:
        """Return the session of this request, with at least `n_rows` rows if it is new, or if it can shrink, fewer."""
        if self._session is None:
            memory = 0 if self._sources is None else max(len(source) for source in self._sources)
            if self.is_static:
                n_rows = batch_bucket(n_rows)
                memory = memory and max(16, size_bucket(memory))
            with torch.inference_mode():
                self._session = self._acquire(CacheShape(n_rows, self._capacity, memory), can_shrink)
                self._session.cache.reset_rows()
        return self._session

    def _acquire(self, shape: CacheShape, can_shrink: bool) -> DecodeSession:
        """Return a session; after an out-of-memory error with fewer slots, if it can shrink."""
        requested = shape.n_slots
        while True:
            try:
                return self.compiled.acquire(shape, is_static=self.is_static)
            except torch.OutOfMemoryError as error:
                if shape.n_slots == 1 or not can_shrink:
                    fits = self._slots_that_fit(shape.capacity + shape.memory_capacity)
                    raise ConfigError(
                        f"{requested} slots of {shape.capacity:,} tokens do not fit into memory; give slots={fits} or "
                        "fewer, shorter prompts or a smaller max_new_tokens"
                    ) from error
                shape = shape._replace(n_slots=shape.n_slots // 2)

    def _slots_that_fit(self, capacity: int) -> int:
        """Return how many slots of `capacity` tokens fit into the memory of the device that is not in use."""
        device = self.program.device
        if device.type != "cuda":
            return _MAX_SLOTS["cpu"]
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        stored = sum(session.cache.n_bytes for session in self.compiled.sessions)  # freed if they are too small
        return int(_MEMORY_FRACTION * (free + stored)) // (self.program.bytes_per_token * capacity)

    def release(self) -> None:
        """End the request: its session is available to the next one."""
        session = self._session
        self._session = None
        if session is not None:
            self.compiled.release(session)

    def prefill(self) -> Float[Tensor, "B V"]:
        """Process all prompts at once, prompt i in row i."""
        self._get_session(self.n_prompts)
        return self.prefill_rows(range(self.n_prompts), range(self.n_prompts))

    def prefill_beams(self, width: int) -> Float[Tensor, "P V"]:
        """Process all prompts, and reserve `width` rows for each; copies of the first fill P."""
        P = batch_bucket(self.n_prompts)
        self._get_session(P * width)
        logits = self.prefill_rows(range(self.n_prompts), range(0, self.n_prompts * width, width))
        return torch.cat((logits, logits[:1].expand(P - self.n_prompts, -1)))

    def prefill_rows(self, prompts: Sequence[int], rows: Sequence[int]) -> Float[Tensor, "P V"]:
        """Process prompts in rows that are free, and return the logits of their next ids."""
        cache = self.cache
        rows = list(rows)
        without_cudnn = sdpa_without_cudnn(self.program.device.type == "cuda")  # it compiles a plan per shape
        with eval_mode(self._modules), torch.inference_mode(), without_cudnn:
            if self._sources is not None:
                encode(self._model, self.program, cache, [self._sources[i] for i in prompts], rows)
            return prefill(self.program, cache, [self._prompts[i] for i in prompts], rows)

    def decode_step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Append one id to each of the first rows, and return the next logits."""
        cache, program = self.cache, self.program
        # Fused layers call no modules, whose mode would matter.
        mode = eval_mode(self._modules) if program.calls_modules else nullcontext()
        with mode, torch.inference_mode():
            cache.begin_step(len(ids))
            x = self._embed(ids)
            x = x if program.embedding_norm is None else apply_norm(x, program.embedding_norm)
            x = program.run_layers(x, Attends(cache.self_attend, cache.memory_attend), fused_linear_decode)
            logits = program.logits_of(x)
            cache.end_step(len(ids))
            return logits

    def _embed(self, ids: Tensor) -> Tensor:
        """Return the newest tokens (R,), embedded with their positions (R, M)."""
        embedding = self.program.embedding
        cache = self.cache
        scale = embedding.scale if embedding.scaled else None
        lengths = cache.lengths[: len(ids)]
        if runs_triton(ids) and self.program.dtype != torch.float64:
            from clearhead.generation.engine.embed_token_triton import embed_token

            return embed_token(ids, embedding.weight, scale, cache.position_table, lengths)
        x = F.embedding(ids, embedding.weight)
        x = x if scale is None else x * scale
        return x if cache.position_table is None else x + F.embedding(lengths, cache.position_table)

    def start_beams(self, width: int) -> None:
        """Let the `width` rows of each prompt share what its prefill computed."""
        with torch.inference_mode():
            self.cache.start_beams(width)

    def reorder_beams(self, rows: Int[Tensor, " R"]) -> None:
        """Replace row i by a copy of row `rows[i]` of the same prompt, without a host sync."""
        with torch.inference_mode():
            self.cache.reorder_beams(rows)

    def select_rows(self, rows: Int[Tensor, " rows"]) -> None:
        """Continue with these rows, which are different."""
        with torch.inference_mode():
            self.cache.select_rows(rows)

    def reorder_cache(self, rows: Int[Tensor, " rows"]) -> None:
        """Replace row i by a copy of row `rows[i]`. Rows may be repeated or dropped."""
        with torch.inference_mode():
            self._get_session().is_reusable = False  # graphs do not read the moved rows
            self.cache.move_rows(rows.to(self.program.device))

    def adopt(self, key: Hashable, state: _State) -> _State:
        """Return the state in memory that captured graphs read, with the values of `state`."""
        with torch.inference_mode():
            stored: _State = self._get_session().states.setdefault(key, state)
            if stored is not state:
                for target, source in zip(state_tensors(stored), state_tensors(state), strict=True):
                    target.copy_(source)
        return stored

    def replay(self, key: Hashable, run: Callable[[], None]) -> None:
        """Call a function that only uses a state from `adopt` and the decoder, through a CUDA graph if possible.

        The first call of a key runs eagerly, so that compilers and libraries initialize; the second one is captured.
        """
        session = self._get_session()
        backend = graphs_for(self.program.device) if self.program.is_capturable and session.is_reusable else None
        replay = session.graphs.get(key)
        if backend is None or key not in session.graphs:
            session.graphs[key] = None
            run()
            return
        if replay is None:
            try:
                replay = session.graphs[key] = backend.capture(run)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                session.is_reusable = False
                run()  # raises again unless only the capture failed
                reason = str(error).strip().partition("\n")[0]
                warnings.warn(f"generation runs without a CUDA graph: {reason}", RuntimeWarning, stacklevel=2)
                return
        replay()
