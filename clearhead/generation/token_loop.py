"""The generation loop (`GenerationLoop`), and greedy decoding and sampling (`TokenLoop`).

A loop stores its state in tensors, and `advance` makes one step without a host sync, so that a step can be captured as
a CUDA graph and run ahead of the host. The host syncs every few steps (every step on a CPU) to check for invalid
logits, for completion, and whether half of the batch is idle. No context (`no_grad`, evaluation mode) outlives a step,
so a consumer may interleave other work or drop the iterator.

    B prompts   R active rows   V vocabulary
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead._core import counter_rng
from clearhead._core.tensor_state import runs_triton
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.generation.decoder import CapturableDecoder, IncrementalDecoder, LogitsError, size_bucket
from clearhead.generation.options import Greedy, Sample, Strategy
from clearhead.generation.results import Generated, GenerationStep
from clearhead.generation.sampling import log_probs_at, probabilities, sample_inverse_cdf, to_float32, topk_logprobs

_SAMPLING_STREAM = 601  # separates these random numbers from those of data
STEPS_PER_SYNC = 8  # steps that a GPU makes between host syncs
_STEPS_PER_SYNC_WITHOUT_STOPS = 64


class GenerationLoop(ABC):
    """A search in progress, and how much of it the host has read."""

    @abstractmethod
    def begin(self) -> None:
        """Allocate the state and make the first step."""

    @abstractmethod
    def advance(self) -> None:
        """Add one id to every active sequence."""

    @abstractmethod
    def sync(self) -> None:
        """Sync with the device: raise on invalid logits and drop finished rows."""

    @abstractmethod
    def result(self) -> Generated:
        """Return the sequences, once the search is over."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return all tensors that `advance` reads and changes."""

    def __init__(
        self, decoder: IncrementalDecoder, strategy: Strategy, max_new_tokens: int, stops: tuple[int, ...]
    ) -> None:
        self.decoder = decoder
        self.stops = stops
        self.max_new_tokens = max_new_tokens
        self.is_async = isinstance(decoder, CapturableDecoder) and decoder.enable_graphs()
        self.pad_id = stops[0] if stops else 0
        self.capacity = size_bucket(max_new_tokens) if self.is_async else max_new_tokens  # ids per sequence
        self.n_steps = 0
        self.n_synced = 0
        self.is_over = False
        # Key of the captured graph. The seed is not part of it: uniforms are an input tensor.
        fixed = dataclasses.replace(strategy, seed=0) if isinstance(strategy, Sample) else strategy
        self.key: Hashable = (fixed, self.capacity, stops)

    def first_logits(self) -> Tensor:
        """Return the logits (B, V) after the prompts; raise if they are invalid or do not cover a stop id."""
        logits = self.decoder.prefill()
        if not logits.is_floating_point():
            raise DtypeError(f"the decoder's logits are {logits.dtype}; expected floating point")
        if logits.dim() != 2 or 0 in logits.shape:
            raise ShapeError(f"the decoder's logits have shape {tuple(logits.shape)}; expected (rows, vocabulary)")
        B, V = logits.shape
        if self.stops and self.stops[-1] >= V:
            raise ConfigError(f"stop id {self.stops[-1]} is outside the vocabulary of {V} ids (0 … {V - 1})")
        self.n_prompts: int = getattr(self.decoder, "n_prompts", B)
        self.stop_ids = torch.tensor(self.stops, dtype=torch.int64, device=logits.device)
        return logits

    def copy_state_from(self, other: GenerationLoop) -> None:
        """Copy the state of another search into the memory of this one."""
        for target, source in zip(self.tensors(), other.tensors(), strict=True):
            target.copy_(source)
        self.n_steps = other.n_steps
        self.n_synced = other.n_synced
        self.is_over = other.is_over
        self.n_prompts = other.n_prompts
        self.max_new_tokens = other.max_new_tokens

    def progress(self, steps_per_sync: int) -> Iterator[Any]:
        """Yield the search after its first step and after each sync: this one, or a captured one with its state."""
        self.begin()
        self.n_steps = 1
        self.sync()
        search: Any = self
        advance: Callable[[], None] = self.advance
        end: Callable[[], None] = _do_nothing
        if isinstance(self.decoder, CapturableDecoder):
            search, advance, end = self.decoder.start_session(self)
        try:
            yield search
            while not search.is_over:
                remaining = search.max_new_tokens - search.n_steps
                steps = min(steps_per_sync if search.is_async else 1, remaining)
                for _ in range(steps):
                    advance()
                search.n_steps += steps
                search.sync()
                yield search
        finally:
            end()

    def run(self, steps_per_sync: int) -> Generated:
        """Run the search to its end and return the result."""
        states = self.progress(steps_per_sync)  # owns the captured graph until the result is copied
        search: GenerationLoop = next(state for state in states if state.is_over)
        return search.result()


def _do_nothing() -> None:
    """End a search that has no captured graph."""


def logits_error(row: int, step: int) -> LogitsError:
    """Return the error for logits that no id can be chosen from."""
    return LogitsError(
        f"the logits for new id {step} of prompt {row} (both counted from 0) are NaN, +∞ or all −∞, so no id can be "
        "chosen; check the model's parameters for NaN and infinity"
    )


def stream_tokens(
    decoder: IncrementalDecoder, strategy: Greedy | Sample, max_new_tokens: int, stops: tuple[int, ...]
) -> Iterator[GenerationStep]:
    """Yield steps until every row has finished."""
    n_yielded = 0
    for state in TokenLoop(decoder, strategy, max_new_tokens, stops).progress(STEPS_PER_SYNC):
        for step in range(n_yielded, state.n_steps):
            yield state.step(step)
        n_yielded = state.n_steps


def run(
    decoder: IncrementalDecoder, strategy: Greedy | Sample, max_new_tokens: int, stops: tuple[int, ...]
) -> Generated:
    """Run greedy decoding or sampling to the end."""
    steps_per_sync = STEPS_PER_SYNC if stops else _STEPS_PER_SYNC_WITHOUT_STOPS
    return TokenLoop(decoder, strategy, max_new_tokens, stops).run(steps_per_sync)


class TokenLoop(GenerationLoop):
    """Greedy decoding or sampling.

    Finished rows are padded. Without CUDA graphs, they are dropped from the batch once they are half of it.
    """

    def __init__(
        self, decoder: IncrementalDecoder, strategy: Greedy | Sample, max_new_tokens: int, stops: tuple[int, ...]
    ) -> None:
        super().__init__(decoder, strategy, max_new_tokens, stops)
        self.strategy = strategy
        self.prompt_of_row: Tensor | None = None  # (R,); None: row i is prompt i

    @torch.no_grad()
    def begin(self) -> None:
        logits = self.first_logits()
        R = len(logits)
        device = logits.device
        self.is_active = torch.arange(R, device=device) < self.n_prompts
        self.newest = torch.zeros(R, dtype=torch.int64, device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.ids = torch.full((self.capacity, R), self.pad_id, device=device)
        self.log_probs = torch.zeros(self.capacity, R, dtype=to_float32(logits[:0]).dtype, device=device)
        self.was_active = torch.zeros(self.capacity, R, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(0, device=device)
        if isinstance(self.strategy, Sample):
            # Counter-based: a row's samples do not depend on the number of rows or steps.
            step = torch.arange(self.capacity)[:, None]
            row = torch.arange(R)
            self.uniforms = counter_rng.uniform64(_SAMPLING_STREAM, self.strategy.seed, step, row).to(device)
        self._append(*self._choose(logits))

    @torch.no_grad()
    def advance(self) -> None:
        self._append(*self._choose(self.decoder.decode_step(self.newest)))

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next id of each row and its log-probability."""
        if not isinstance(self.strategy, Sample):
            ids, log_probs = topk_logprobs(logits, 1)
            return ids.squeeze(1), log_probs.squeeze(1)
        uniform = self.uniforms.index_select(0, self.index).squeeze(0)
        uniform = uniform if self.prompt_of_row is None else uniform[self.prompt_of_row]
        ids = sample_inverse_cdf(probabilities(logits, self.strategy), uniform)
        return ids, log_probs_at(logits, ids[:, None]).squeeze(1)

    def _append(self, ids: Tensor, log_probs: Tensor) -> None:
        """Append a step to the results and update which rows are active."""
        is_fused = self.prompt_of_row is None and self.is_async and runs_triton(ids)
        if is_fused and log_probs.dtype == torch.float32:
            from clearhead.generation.append_token_triton import append_token

            state = self.is_active, self.newest, self.index, self.ids, self.log_probs, self.was_active
            append_token(ids, log_probs, state, self.stop_ids, self.pad_id)
            return
        self._write(self.ids, torch.where(self.is_active, ids, self.pad_id))
        self._write(self.log_probs, torch.where(self.is_active, log_probs, 0.0))
        self._write(self.was_active, self.is_active)
        self.newest.copy_(ids)
        if self.stops:
            self.is_active.logical_and_((ids[:, None] != self.stop_ids).all(1))
        self.index += 1

    def _write(self, results: Tensor, values: Tensor) -> None:
        """Write values (R,) at the current index of (capacity, B); dropped prompts keep their padding."""
        if self.prompt_of_row is None:
            results.index_copy_(0, self.index, values[None])
        else:
            results[self.index, self.prompt_of_row] = values

    def sync(self) -> None:
        is_invalid = ~self.log_probs[self.n_synced : self.n_steps].isfinite()
        n_invalid, n_active = torch.stack((is_invalid.sum(), self.is_active.sum())).tolist()
        if n_invalid:
            step, row = is_invalid.nonzero()[0].tolist()
            raise logits_error(row, self.n_synced + step)
        self.n_synced = self.n_steps
        self.is_over = n_active == 0 or self.n_steps == self.max_new_tokens
        if self.is_over or self.is_async or 2 * n_active > len(self.is_active):
            return
        active = self.is_active.nonzero().squeeze(-1)
        self.decoder.reorder_cache(active)
        self.prompt_of_row = active if self.prompt_of_row is None else self.prompt_of_row[active]
        self.newest = self.newest[active]
        self.is_active = self.is_active[active]

    def step(self, n: int) -> GenerationStep:
        """Return step `n`."""
        return GenerationStep(*(x[n, : self.n_prompts].clone() for x in (self.ids, self.log_probs, self.was_active)))

    def result(self) -> Generated:
        B = self.n_prompts
        lengths = self.was_active[: self.n_steps, :B].sum(0)
        longest = int(lengths.max())
        ids = self.ids[:longest, :B].T.clone()  # (B, T)
        log_probs = self.log_probs[:longest, :B].T.clone()
        last = ids.gather(1, lengths[:, None] - 1).squeeze(1)
        finished = torch.isin(last, self.stop_ids)
        return Generated(
            ids=ids[:, None],
            lengths=lengths[:, None],
            log_probs=log_probs[:, None],
            scores=log_probs.sum(1)[:, None],
            finished=finished[:, None],
        )

    def tensors(self) -> list[Tensor]:
        results = self.ids, self.log_probs, self.was_active
        return [self.is_active, self.newest, self.index, *results, self.stop_ids, self.uniforms]
