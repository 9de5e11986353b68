"""Beam search over fixed-shape tensors.

Each `advance` extends every live hypothesis by every id, keeps the best, and moves finished ones into the pool.
`options.BeamSearch` defines scores and the end of a search. The state has fixed shapes and `advance` never syncs with
the host, so that a step can be captured as a CUDA graph. The pool of a prompt that is done no longer changes; without
CUDA graphs, the host drops such prompts when it syncs.

    P prompts in the state   W live hypotheses per prompt   C candidates   N capacity in ids   V vocabulary
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ConfigError
from clearhead.generation.decoder import ContinuousDecoder, IncrementalDecoder, size_bucket
from clearhead.generation.logits_processors import LogitsProcessingDecoder
from clearhead.generation.options import BeamSearch
from clearhead.generation.request import SearchRequest
from clearhead.generation.results import Generated
from clearhead.generation.sampling import to_float32, topk, topk_logprobs
from clearhead.generation.token_loop import GenerationLoop, logits_error

_STEPS_PER_SYNC = 4  # steps that a GPU makes between host syncs


def beam_search(decoder: IncrementalDecoder, request: SearchRequest) -> Generated:
    """Return the `n_best` sequences of each prompt."""
    beam = request.strategy
    assert isinstance(beam, BeamSearch)
    try:
        divisor = float(request.max_new_tokens) ** beam.length_penalty
    except OverflowError:
        divisor = math.inf
    if not 0 < divisor < math.inf:
        raise ConfigError(
            f"BeamSearch: length_penalty is {beam.length_penalty!r} and max_new_tokens {request.max_new_tokens}; "
            "expected a power of the length within the range of a float: usually 0 to 2"
        )
    if not isinstance(decoder, ContinuousDecoder):
        return BeamLoop(decoder, request).run()
    n = max(1, decoder.max_rows // beam.width)
    parts = [range(i, min(i + n, decoder.n_prompts)) for i in range(0, decoder.n_prompts, n)]
    pad_id = request.stop_ids[0] if request.stop_ids else 0
    return concatenate([BeamLoop(decoder.subset(part), request).run() for part in parts], pad_id)


class _Sequences(NamedTuple):
    """W sequences per prompt, best first; a score of −∞ marks an empty slot."""

    scores: Tensor  # (P, W) float64: Σ log p of live hypotheses, the final score of finished ones
    ids: Tensor  # (P, W, N)
    log_probs: Tensor  # (P, W, N)
    lengths: Tensor  # (P, W)
    finished: Tensor  # (P, W)

    @staticmethod
    def empty(P: int, W: int, N: int, dtype: torch.dtype, device: torch.device) -> _Sequences:
        ids = torch.zeros(P, W, N, dtype=torch.int64, device=device)
        lengths = torch.zeros(P, W, dtype=torch.int64, device=device)
        scores = torch.full((P, W), -math.inf, dtype=torch.float64, device=device)
        return _Sequences(scores, ids, ids.to(dtype), lengths, lengths.bool())

    def take(self, index: Tensor) -> _Sequences:
        """Return the sequences at `index` (P, W′) of each prompt."""
        index3d = index[..., None].expand(*index.shape, self.ids.shape[-1])
        return _Sequences(*(x.gather(1, index3d if x.dim() == 3 else index) for x in self))

    def copy_(self, other: _Sequences) -> None:
        for target, source in zip(self, other, strict=True):
            target.copy_(source)


class _BeamState(NamedTuple):
    """The tensors that a step changes, and those that it depends on."""

    live: _Sequences
    pool: _Sequences  # finished sequences
    n: Tensor  # (1,) number of new ids
    is_done: Tensor  # (P,)
    n_finished: Tensor  # (P,)
    invalid_step: Tensor  # (P,) the first step with invalid logits, or −1
    stop_ids: Tensor
    divisors: Tensor  # n**length_penalty for every n
    last_step: Tensor  # (1,)
    first_row: Tensor  # (P, 1) first row of each prompt


class BeamLoop(GenerationLoop):
    """The state of a beam search: live hypotheses, the pool of finished ones, and the results of dropped prompts."""

    def __init__(self, decoder: IncrementalDecoder, request: SearchRequest) -> None:
        super().__init__(decoder, request)
        assert isinstance(request.strategy, BeamSearch)
        self.beam = request.strategy
        self.capacity = size_bucket(self.max_new_tokens) if self.is_static else self.max_new_tokens
        self.has_log_probs = isinstance(decoder, LogitsProcessingDecoder) and decoder.returns_log_probs
        self.pending_reorder: Tensor | None = None  # applied at the next sync, together with dropped prompts
        self.n_steps = 0

    @torch.no_grad()
    def begin(self) -> None:
        W = self.beam.width
        logits = self.check_logits(self.decoder.prefill() if self.static is None else self.static.prefill_beams(W))
        P = len(logits)
        device = logits.device
        dtype = to_float32(logits[:0]).dtype
        self.n_prompts = P if self.static is None else self.static.n_prompts
        self.prompt_of_row = torch.arange(P, device=device)  # (P,)
        self.results = _Sequences.empty(P, W, self.capacity, dtype, device)
        # n**length_penalty as Python computes it, for every n
        max_new = self.max_new_tokens
        powers = [float(min(n, max_new)) ** self.beam.length_penalty for n in range(1, self.capacity + 2)]
        state = _BeamState(
            live=_Sequences.empty(P, W, self.capacity, dtype, device),
            pool=_Sequences.empty(P, W, self.capacity, dtype, device),
            n=torch.zeros(1, dtype=torch.int64, device=device),
            is_done=self.prompt_of_row >= self.n_prompts,
            n_finished=torch.zeros(P, dtype=torch.int64, device=device),
            invalid_step=torch.full((P,), -1, device=device),
            stop_ids=torch.tensor(self.stops, dtype=torch.int64, device=device),
            divisors=torch.tensor([1.0, *powers], dtype=torch.float64, device=device),
            last_step=torch.full((1,), max_new, device=device),
            first_row=self.prompt_of_row[:, None] * W,
        )
        self.key = (self.beam, P, self.capacity, dtype, len(self.stops))
        self.bind(state if self.static is None else self.static.adopt(self.key, state))
        self._extend(logits, torch.zeros(P, 1, dtype=torch.float64, device=device))
        if self.static is None:
            self.decoder.reorder_cache(self.prompt_of_row.repeat_interleave(W))
        else:
            self.static.start_beams(W)
        self.n_steps = 1

    def bind(self, state: _BeamState) -> None:
        """Use the tensors of a state."""
        self.live, self.pool, self.n, self.is_done, self.n_finished = state[:5]
        self.invalid_step, self.stop_ids, self.divisors, self.last_step, self.first_row = state[5:]

    @torch.no_grad()
    def advance(self) -> None:
        steps = min(_STEPS_PER_SYNC, self.max_new_tokens - self.n_steps) if self.is_static else 1
        for _ in range(steps):
            if self.static is None:
                self._step()
            else:
                self.static.replay(self.key, self._step)
        self.n_steps += steps

    def _step(self) -> None:
        """Extend every hypothesis by one id."""
        newest = self.live.ids.gather(2, (self.n - 1).expand(*self.live.scores.shape, 1)).flatten()
        parent = self._extend(self.decoder.decode_step(newest), self.live.scores)
        rows = (self.first_row + parent).flatten()
        if self.static is None:
            is_identity = torch.equal(rows, torch.arange(len(rows), device=rows.device))
            self.pending_reorder = None if is_identity else rows
        else:
            self.static.reorder_beams(rows)

    def _extend(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Extend hypotheses with scores (P, W or 1) by their logits, and return the parent of each new hypothesis."""
        scores, parent, ids, log_probs = self._candidates(logits, scores)
        width = self.beam.width
        is_possible = scores > -math.inf
        is_stop = (ids[..., None] == self.stop_ids).any(-1)
        index = self.n.expand(*self.live.scores.shape, 1).clone()
        self.n += 1

        def extended(candidates: Tensor) -> _Sequences:
            """Return the candidates at these indices (P, W)."""
            sequences = self.live.take(parent.gather(1, candidates))
            sequences.ids.scatter_(2, index, ids.gather(1, candidates)[..., None])
            sequences.log_probs.scatter_(2, index, log_probs.gather(1, candidates)[..., None])
            return sequences

        # A stop id finishes a sequence only among the best `width`; in the last step all of these end.
        first = torch.arange(width, device=ids.device).expand(len(ids), -1)
        is_last = self.n == self.last_step
        ends = ((is_stop | is_last) & is_possible)[:, :width] & ~self.is_done[:, None]
        self.n_finished += ends.sum(1)
        final = (scores[:, :width] / self.divisors[self.n]).masked_fill(~ends, -math.inf)
        lengths = self.n.expand(*ends.shape)
        finished = ends & is_stop[:, :width]
        self._add_to_pool(extended(first)._replace(scores=final, lengths=lengths, finished=finished))
        # The best candidates without a stop id stay alive, in their order; empty slots may follow.
        order = (~is_stop & is_possible).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :width]
        live_scores = scores.gather(1, order).masked_fill(is_stop.gather(1, order), -math.inf)
        self.live.copy_(extended(order)._replace(scores=live_scores))
        parent = parent.gather(1, order)
        none_alive = ~(live_scores > -math.inf).any(1)
        # Processors may ban every id of every hypothesis.
        has_failed = none_alive & (self.n_finished == 0) & ~self.is_done & (self.invalid_step < 0)
        self.invalid_step.copy_(torch.where(has_failed, self.n - 1, self.invalid_step))
        self.is_done.logical_or_(is_last | none_alive | self._is_settled() | self._cannot_improve())
        return parent

    def _candidates(self, logits: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        """Return the best continuations of each prompt, best first, each (P, C).

        They are their scores (−∞ for none), their parents, their ids and their log-probabilities.
        """
        P, W = scores.shape
        width = self.beam.width
        # Enough for `width` without a stop: each hypothesis has at most len(stops) stop ids among its best.
        n_candidates = width * (1 + len(self.stops))
        k = min(n_candidates, logits.shape[-1])
        if self.has_log_probs:
            top_ids, top_log_probs = topk(logits, k)
        else:
            # The top k of the logits, because rounding makes some distinct logits equal as log-probabilities.
            top_ids, top_log_probs = topk_logprobs(logits, k)
        ids = top_ids.unflatten(0, (P, W))  # (P, W, k)
        log_probs = top_log_probs.unflatten(0, (P, W))
        is_empty = scores == -math.inf
        total = (scores[..., None] + log_probs).masked_fill(is_empty[..., None], -math.inf).flatten(1)
        # Log-probabilities are NaN for every id if any logit is NaN or +∞, or all are −∞.
        is_invalid = total.isnan().any(1) & ~self.is_done & (self.invalid_step < 0)
        self.invalid_step.copy_(torch.where(is_invalid, self.n, self.invalid_step))
        ordered = total.sort(dim=1, descending=True, stable=True)
        order = ordered.indices[:, :n_candidates]  # (P, C)
        scores = ordered.values[:, :n_candidates]
        parent = order.div(k, rounding_mode="floor")
        ids = ids.flatten(1).gather(1, order)
        log_probs = log_probs.flatten(1).gather(1, order)
        missing = width - order.shape[1]
        if missing > 0:  # a vocabulary smaller than the beam
            scores = F.pad(scores, (0, missing), value=-math.inf)
            parent, ids, log_probs = (F.pad(x, (0, missing)) for x in (parent, ids, log_probs))
        return scores, parent, ids, log_probs

    def _add_to_pool(self, new: _Sequences) -> None:
        """Keep the best W of the pool and of `new`, whose scores are final; ties go to the earlier."""
        merged = _Sequences(*(torch.cat(pair, dim=1) for pair in zip(self.pool, new, strict=True)))
        order = merged.scores.sort(dim=1, descending=True, stable=True).indices
        self.pool.copy_(merged.take(order[:, : self.beam.width]))

    def _is_settled(self) -> Tensor:
        """Return (P,) whether the search of a prompt ends by the rule of `early_stopping`."""
        is_full = self.n_finished >= self.beam.width
        if self.beam.early_stopping is True:
            return is_full
        favors_length = self.beam.early_stopping == "never" and self.beam.length_penalty > 0
        divisor = self.divisors[-1:] if favors_length else self.divisors[self.n]
        return is_full & (self.live.scores.amax(1) / divisor <= self.pool.scores[:, -1])

    def _cannot_improve(self) -> Tensor:
        """Return (P,) whether no live hypothesis can exceed the n_best-th finished score.

        An extension adds at most 0 to Σ log p ≤ 0, so the best reachable score is at the largest divisor.
        """
        best_divisor = self.divisors[-1:]
        if self.beam.length_penalty < 0:
            best_divisor = self.divisors[(self.n + 1).minimum(self.last_step)]
        threshold = self.pool.scores[:, self.beam.n_best - 1]
        return (threshold > -math.inf) & (threshold >= self.live.scores.amax(1) / best_divisor)

    @torch.no_grad()
    def sync(self) -> None:
        n_invalid, n_open = torch.stack(((self.invalid_step >= 0).sum(), (~self.is_done).sum())).tolist()
        if n_invalid:
            steps = self.invalid_step.masked_fill(self.invalid_step < 0, self.max_new_tokens)
            row = int(steps.argmin())
            raise logits_error(int(self.prompt_of_row[row]), int(steps[row]))
        self.is_over = not n_open or self.n_steps == self.max_new_tokens
        if self.is_over:
            self._store_results(torch.ones_like(self.is_done))
        if self.is_over or self.is_static:
            return
        is_open = ~self.is_done
        rows = self.pending_reorder
        if n_open < len(is_open):
            self._store_results(self.is_done)
            rows = torch.arange(len(is_open) * self.beam.width, device=is_open.device) if rows is None else rows
            rows = rows.view(-1, self.beam.width)[is_open].flatten()
            self.live = _Sequences(*(x[is_open] for x in self.live))
            self.pool = _Sequences(*(x[is_open] for x in self.pool))
            self.prompt_of_row = self.prompt_of_row[is_open]
            self.n_finished = self.n_finished[is_open]
            self.invalid_step = self.invalid_step[is_open]
            self.is_done = self.is_done[is_open]
            self.first_row = self.first_row[: len(self.prompt_of_row)]
        if rows is not None:
            self.decoder.reorder_cache(rows)

    def _store_results(self, selected: Tensor) -> None:
        """Store the results of the `selected` (P,) prompts."""
        for target, source in zip(self.results, self.pool, strict=True):
            target[self.prompt_of_row[selected]] = source[selected]

    def result(self) -> Generated:
        B = self.n_prompts
        N = self.beam.n_best
        scores, ids, log_probs, lengths, finished = (x[:B, :N] for x in self.results)
        is_empty = scores == -math.inf
        lengths = lengths.masked_fill(is_empty, 0)
        longest = int(lengths.max())
        is_padding = torch.arange(longest, device=ids.device) >= lengths[..., None]
        return Generated(
            ids=ids[..., :longest].masked_fill(is_padding, self.pad_id),
            lengths=lengths,
            log_probs=log_probs[..., :longest].masked_fill(is_padding, 0.0),
            scores=scores.to(log_probs.dtype),
            finished=finished & ~is_empty,
        )


def concatenate(parts: list[Generated], pad_id: int) -> Generated:
    """Return the results of several searches as one, padded to the longest sequence."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.ids.shape[2] for part in parts)
    more = [longest - part.ids.shape[2] for part in parts]
    return Generated(
        ids=torch.cat([F.pad(part.ids, (0, n), value=pad_id) for part, n in zip(parts, more, strict=True)]),
        lengths=torch.cat([part.lengths for part in parts]),
        log_probs=torch.cat([F.pad(part.log_probs, (0, n)) for part, n in zip(parts, more, strict=True)]),
        scores=torch.cat([part.scores for part in parts]),
        finished=torch.cat([part.finished for part in parts]),
    )
