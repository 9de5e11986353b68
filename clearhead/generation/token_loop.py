"""Greedy decoding and sampling (`TokenLoop`), and the base class of searches (`GenerationLoop`).

A search stores its state in tensors, and a step makes no host sync if the decoder has static shapes, so that a step can
be captured as a CUDA graph and run ahead of the host. Every few steps (every step on a CPU) the host copies the new ids
to the results, and gives the rows of finished sequences to further prompts, so that the batch stays full. No context
(`no_grad`, evaluation mode) outlives a step, so a consumer may interleave other work or drop the iterator.

    B prompts   R rows   V vocabulary   L steps between syncs
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead._core import counter_rng
from clearhead._core.tensor_state import runs_triton
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.generation.decoder import ContinuousDecoder, IncrementalDecoder, LogitsError, batch_bucket
from clearhead.generation.options import Greedy, Sample
from clearhead.generation.request import SearchRequest
from clearhead.generation.results import Generated, GenerationStep
from clearhead.generation.sampling import SamplingParameters, sample_with_logprobs, to_float32, topk_logprobs

_SAMPLING_STREAM = 601  # separates these random numbers from those of data
STEPS_PER_SYNC = 8  # steps that a GPU makes between host syncs
_MAX_STEPS_PER_SYNC = 64  # if no row can end before
_ROWS_PER_ADMISSION = 8  # on a GPU, prompts are admitted once this fraction of the rows is free
_INITIAL_IDS = 512  # ids per prompt that the results have room for at first


class GenerationLoop(ABC):
    """A search in progress."""

    def __init__(self, decoder: IncrementalDecoder, request: SearchRequest) -> None:
        self.decoder = decoder
        self.continuous = decoder if isinstance(decoder, ContinuousDecoder) else None
        self.static = self.continuous if self.continuous is not None and self.continuous.is_static else None
        self.is_static = self.static is not None
        self.stops = request.stop_ids
        self.max_new_tokens = request.max_new_tokens
        self.pad_id = self.stops[0] if self.stops else 0
        self.is_over = False

    @abstractmethod
    def begin(self) -> None:
        """Allocate the state and make the first step."""

    @abstractmethod
    def advance(self) -> None:
        """Add ids to every active sequence: several if no host sync is needed between them."""

    @abstractmethod
    def sync(self) -> None:
        """Sync with the device: raise on invalid logits, and store results."""

    @abstractmethod
    def result(self) -> Generated:
        """Return the sequences, once the search is over."""

    def check_logits(self, logits: Tensor) -> Tensor:
        """Return the logits (rows, V) after the prompts; raise if they are invalid or do not cover a stop id."""
        if not logits.is_floating_point():
            raise DtypeError(f"the decoder's logits are {logits.dtype}; expected floating point")
        if logits.dim() != 2 or 0 in logits.shape:
            raise ShapeError(f"the decoder's logits have shape {tuple(logits.shape)}; expected (rows, vocabulary)")
        V = logits.shape[1]
        if self.stops and self.stops[-1] >= V:
            raise ConfigError(f"stop id {self.stops[-1]} is outside the vocabulary of {V} ids (0 … {V - 1})")
        return logits

    def progress(self) -> Iterator[None]:
        """Run the search, and yield after its first step and after each sync."""
        try:
            self.begin()
            self.sync()
            yield
            while not self.is_over:
                self.advance()
                self.sync()
                yield
        finally:
            if self.continuous is not None:
                self.continuous.release()

    def run(self) -> Generated:
        """Run the search to its end and return the result."""
        for _ in self.progress():
            pass
        return self.result()


def _int64(seed: int) -> int:
    """Return the seed modulo 2⁶⁴ as a signed integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def logits_error(row: int, step: int) -> LogitsError:
    """Return the error for logits that no id can be chosen from."""
    return LogitsError(
        f"the logits for new id {step} of prompt {row} (both counted from 0) are NaN, +∞ or all −∞, so no id can be "
        "chosen; check the model's parameters for NaN and infinity"
    )


class TokenState(NamedTuple):
    """The rows of a batch, and the log of the steps since the last sync."""

    newest: Tensor  # (R,) int64
    step: Tensor  # (R,) int64: number of new ids
    prompt: Tensor  # (R,) int64: index of the prompt
    is_active: Tensor  # (R,) bool
    max_new_tokens: Tensor  # (1,) int64
    stop_ids: Tensor  # (stops,) int64, padded with −1
    seed: Tensor  # (1,) int64
    sampling: Tensor  # (4,) float64: the fields of `SamplingParameters`
    log_length: Tensor  # (1,) int64
    ids: Tensor  # (L, R) int64
    log_probs: Tensor  # (L, R)
    was_active: Tensor  # (L, R) bool


_ROW_FIELDS = ("newest", "step", "prompt", "is_active", "ids", "log_probs", "was_active")  # of `TokenState`


class TokenLoop(GenerationLoop):
    """Greedy decoding or sampling, with continuous batching if the decoder supports it."""

    def __init__(self, decoder: IncrementalDecoder, request: SearchRequest) -> None:
        super().__init__(decoder, request)
        assert isinstance(request.strategy, (Greedy, Sample))
        self.strategy: Greedy | Sample = request.strategy

    @torch.no_grad()
    def begin(self) -> None:
        if self.continuous is None:
            logits = self.check_logits(self.decoder.prefill())
            self.n_prompts = n_rows = n_slots = len(logits)
        else:
            self.n_prompts = self.continuous.n_prompts
            n_rows, n_slots = self.continuous.reserve_rows()
            logits = self.check_logits(self.continuous.prefill_rows(range(n_rows), range(n_rows)))
        self.device = logits.device
        self.pending = range(n_rows, self.n_prompts)
        self.n_rows = n_rows  # prompts that are decoded at once
        self.R = batch_bucket(n_rows) if self.is_static else n_rows  # rows of a step
        # Graphs do not depend on the number of prompts.
        self._allocate(n_slots if self.is_static else n_rows, to_float32(logits[:0]).dtype)
        self._admit(logits, range(n_rows), range(n_rows))

    def _allocate(self, R: int, dtype: torch.dtype) -> None:
        """Create the state of R rows, without prompts, and the results of all prompts on the host."""
        device = self.device
        L = _MAX_STEPS_PER_SYNC if self.is_static else 1
        zeros = torch.zeros(R, dtype=torch.int64, device=device)
        n_stops = 1 << max(0, len(self.stops) - 1).bit_length()
        stops = [*self.stops, *[-1] * (n_stops - len(self.stops))]
        sample = self.strategy if isinstance(self.strategy, Sample) else None
        self.sampling = None if sample is None else SamplingParameters.of(sample)
        numbers = [math.nan if x is None else x for x in self.sampling or [0.0] * 4]
        state = TokenState(
            newest=zeros,
            step=zeros.clone(),
            prompt=zeros.clone(),
            is_active=zeros.bool(),
            max_new_tokens=torch.tensor([self.max_new_tokens], device=device),
            stop_ids=torch.tensor(stops, dtype=torch.int64, device=device),
            seed=torch.tensor([0 if sample is None else _int64(sample.seed)], device=device),
            sampling=torch.tensor(numbers, dtype=torch.float64, device=device),
            log_length=torch.zeros(1, dtype=torch.int64, device=device),
            ids=torch.zeros(L, R, dtype=torch.int64, device=device),
            log_probs=torch.zeros(L, R, dtype=dtype, device=device),
            was_active=torch.zeros(L, R, dtype=torch.bool, device=device),
        )
        filters = None if self.sampling is None else tuple(x is not None for x in self.sampling)
        self.key = ("tokens", dtype, filters, n_stops)
        self.state = state if self.static is None else self.static.adopt(self.key, state)
        if self.sampling is not None and (self.is_static or runs_triton(state.sampling)):
            self.sampling = self.sampling.stored_in(self.state.sampling)
        self.n_logged = 0
        self.prompt_of_row = torch.zeros(self.R, dtype=torch.int64)  # on the host
        self.lengths = torch.zeros(self.n_prompts, dtype=torch.int64)
        columns = min(self.max_new_tokens, _INITIAL_IDS)
        self.ids = torch.full((self.n_prompts, columns), self.pad_id)
        self.log_probs = torch.zeros(self.n_prompts, columns, dtype=dtype)
        self.active = torch.zeros(self.R, dtype=torch.bool)  # `is_active` at the last sync

    def _admit(self, logits: Tensor, prompts: Sequence[int], rows: Sequence[int]) -> None:
        """Choose the first ids of prompts from their logits, and put them into these rows."""
        state = self.state
        row = torch.tensor(rows, device=self.device)
        prompt = torch.tensor(prompts, device=self.device)
        ids, log_probs = self._choose(logits, torch.zeros_like(prompt), prompt)
        is_active = (ids[:, None] != state.stop_ids).all(1) & (state.max_new_tokens > 1)
        state.newest[row] = ids
        state.step[row] = torch.ones_like(ids)
        state.prompt[row] = prompt
        state.is_active[row] = is_active
        self._store(prompt.cpu(), torch.zeros(len(prompts), dtype=torch.int64), ids.cpu(), log_probs.cpu())
        self.prompt_of_row[list(rows)] = prompt.cpu()
        self.active[list(rows)] = is_active.cpu()

    @torch.no_grad()
    def advance(self) -> None:
        steps = 1
        if self.is_static:
            n_remaining = self.max_new_tokens - int(self.lengths[self.prompt_of_row[self.active]].min())
            steps = min(STEPS_PER_SYNC if self.stops or self.pending else _MAX_STEPS_PER_SYNC, n_remaining)
        for _ in range(steps):
            if self.static is None:
                self._step(self.R)
            else:
                self.static.replay((*self.key, self.R), partial(self._step, self.R))
        self.n_logged = steps

    def _step(self, R: int) -> None:
        """Add one id to each of the first R rows."""
        state = self.state
        logits = self.decoder.decode_step(state.newest[:R])
        self._append(R, *self._choose(logits, state.step[:R], state.prompt[:R]))

    def _choose(self, logits: Tensor, step: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next id of each row and its log-probability."""
        if self.sampling is None:
            ids, log_probs = topk_logprobs(logits, 1)
            return ids.squeeze(1), log_probs.squeeze(1)
        # Counter-based: a row's samples do not depend on the number of rows or steps.
        keys = _SAMPLING_STREAM, self.state.seed, step, prompt
        if runs_triton(logits):
            from clearhead.ops.counter_rng_triton import launch

            uniform = launch(*keys)
        else:
            uniform = counter_rng.uniform64(*keys)
        return sample_with_logprobs(logits, self.sampling, uniform)

    def _append(self, R: int, ids: Tensor, log_probs: Tensor) -> None:
        """Append a step to the log and update which rows are active."""
        state = self.state
        if self.is_static and runs_triton(ids) and log_probs.dtype == torch.float32:
            from clearhead.generation.append_token_triton import append_token

            append_token(R, ids, log_probs, state)
            return
        is_active = state.is_active[:R]
        for log, values in ((state.ids, ids), (state.log_probs, log_probs), (state.was_active, is_active)):
            log[:, :R].index_copy_(0, state.log_length, values[None])
        state.newest[:R] = ids
        state.step[:R] += is_active
        is_active &= (ids[:, None] != state.stop_ids).all(1) & (state.step[:R] < state.max_new_tokens)
        state.log_length.add_(1)

    @torch.no_grad()
    def sync(self) -> None:
        if self.n_logged:
            self._read_log()
        if self.pending:
            self._admit_pending()
        elif self.active.any():
            self._drop_finished_rows()
        self.is_over = not self.pending and not self.active.any()

    def _read_log(self) -> None:
        """Copy the steps since the last sync to the results."""
        n, R, state = self.n_logged, self.R, self.state
        logs = (x[:n, :R] for x in (state.ids, state.log_probs, state.was_active))
        ids, log_probs, was_active = (x.to("cpu", non_blocking=self.device.type == "cuda") for x in logs)
        self.active = state.is_active[:R].cpu()  # after the copies
        state.log_length.zero_()
        self.n_logged = 0
        step, row = was_active.nonzero(as_tuple=True)
        prompt = self.prompt_of_row[row]
        self._store(prompt, self.lengths[prompt] + step, ids[step, row], log_probs[step, row])

    def _store(self, prompt: Tensor, step: Tensor, ids: Tensor, log_probs: Tensor) -> None:
        """Store new ids of prompts at these steps; each is a 1-D tensor on the host."""
        if not bool(log_probs.isfinite().all()):
            first = int((~log_probs.isfinite()).nonzero()[0])
            raise logits_error(int(prompt[first]), int(step[first]))
        if len(step) and int(step.max()) >= self.ids.shape[1]:
            more = min(2 * self.ids.shape[1], self.max_new_tokens) - self.ids.shape[1]
            self.ids = torch.nn.functional.pad(self.ids, (0, more), value=self.pad_id)
            self.log_probs = torch.nn.functional.pad(self.log_probs, (0, more))
        self.ids[prompt, step] = ids
        self.log_probs[prompt, step] = log_probs
        self.lengths.index_add_(0, prompt, torch.ones_like(prompt))

    def _admit_pending(self) -> None:
        """Give the rows of finished sequences to further prompts, which may end with their first id."""
        assert self.continuous is not None
        most = self.R // _ROWS_PER_ADMISSION if self.is_static else 1
        while self.pending:
            free = (~self.active[: self.n_rows]).nonzero().squeeze(-1).tolist()
            if len(free) < max(1, min(len(self.pending), most)):
                return
            prompts, self.pending = self.pending[: len(free)], self.pending[len(free) :]
            rows = free[: len(prompts)]
            self._admit(self.continuous.prefill_rows(prompts, rows), prompts, rows)
            if self.active.any():
                return

    def _drop_finished_rows(self) -> None:
        """Continue with fewer rows, if that is worth it."""
        active = self.active.nonzero().squeeze(-1)
        # Without a graph, dropping rows copies the cache, which pays off for half of them.
        smaller = batch_bucket(len(active)) if self.is_static else len(active)
        limit = self.R - 1 if self.is_static else self.R // 2
        if smaller <= limit:
            self._select(active, smaller)

    def _select(self, active: Tensor, R: int) -> None:
        """Move the active rows to the first R rows."""
        state = self.state
        rows = active.to(self.device)
        if self.static is not None:
            self.static.select_rows(rows)
            for x in (state.newest, state.step, state.prompt):
                x[: len(rows)] = x[rows]
            state.is_active.copy_(torch.arange(len(state.is_active), device=self.device) < len(rows))
        else:
            self.decoder.reorder_cache(rows)
            self.state = state._replace(**{name: getattr(state, name)[..., rows] for name in _ROW_FIELDS})
        self.prompt_of_row = self.prompt_of_row[torch.cat((active, active[:1].expand(R - len(active))))]
        self.active = torch.arange(R) < len(active)
        self.R = R

    def stream(self) -> Iterator[GenerationStep]:
        """Yield steps until every row has finished. All prompts must be decoded at once."""
        n_yielded = 0
        for _ in self.progress():
            n_steps = int(self.lengths.max())
            for n in range(n_yielded, n_steps):
                columns = self.ids[:, n], self.log_probs[:, n], n < self.lengths
                yield GenerationStep(*(column.to(self.device) for column in columns))
            n_yielded = n_steps

    def result(self) -> Generated:
        longest = int(self.lengths.max())
        ids, log_probs = self.ids[:, :longest], self.log_probs[:, :longest]
        last = ids.gather(1, self.lengths[:, None] - 1)
        finished = torch.isin(last, torch.tensor(self.stops, dtype=torch.int64))
        return Generated(
            ids=ids[:, None].contiguous(),
            lengths=self.lengths[:, None],
            log_probs=log_probs[:, None].contiguous(),
            scores=log_probs.sum(1)[:, None],
            finished=finished,
        ).to(self.device)
