"""Choosing ids from logits: top-k with log-probabilities, and sampling with filters.

Ties go to the smaller id. On a GPU Triton kernels are used, on other devices torch operators. Both compute sampling in
float64, so that rounding in a long cumulative sum or at a small temperature does not change an id, unless its random
number is within about V · 2⁻⁵³ of a step of the cumulative distribution.

    R rows   V vocabulary   k ids per row
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import runs_triton
from clearhead.generation.options import Sample

_MAX_KERNEL_K = 32
_LOGITS_PER_CHUNK = 1 << 18
_SEGMENT = 64  # logits whose maximum is computed first


def to_float32(logits: Tensor) -> Tensor:
    """Promote logits to at least float32, because log-probabilities are summed."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def topk_logprobs(logits: Float[Tensor, "R V"], k: int) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    """Return the ids of the k largest logits of each row, largest first, and their log-probabilities."""
    if k <= _MAX_KERNEL_K and runs_triton(logits) and logits.dtype != torch.float64:
        from clearhead.ops.topk_triton import launch

        return launch(logits, k)
    ids = _topk_ids(logits, k)
    return ids, log_probs_at(logits, ids)


def topk(x: Float[Tensor, "R V"], k: int) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    """Return the ids of the k largest values of each row, largest first, and the values."""
    ids = _topk_ids(x, k)
    return ids, x.gather(1, ids)


def _topk_ids(x: Tensor, k: int) -> Tensor:
    """Return the ids (R, k) of the k largest values of each row; ties go to the smaller id."""
    if k == 1:
        return _argmax(x)
    if x.is_cuda:  # no host sync inside a captured graph
        return x.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return _stable_topk(x, k)


def log_probs_at(logits: Float[Tensor, "R V"], ids: Int[Tensor, "R k"]) -> Float[Tensor, "R k"]:
    """Return log softmax(logits) at `ids`, in float32 or wider."""
    logits = to_float32(logits)
    if logits.is_cuda:
        return logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    # A few rows at a time, so that intermediates stay in the processor's cache.
    chunk = max(1, _LOGITS_PER_CHUNK // logits.shape[-1])
    parts = zip(logits.split(chunk), ids.split(chunk), strict=True)
    return torch.cat([part.log_softmax(-1).gather(-1, part_ids) for part, part_ids in parts])


def _argmax(x: Tensor) -> Tensor:
    """Return the index (R, 1) of the first maximum of each row.

    `argmax` along a long row takes many times as long as `amax`, so the first segment with the maximum is found first.
    """
    V = x.shape[1]
    if V <= 2 * _SEGMENT:
        return x.argmax(1, keepdim=True)
    n = V // _SEGMENT
    maxima = x[:, : n * _SEGMENT].unflatten(1, (n, _SEGMENT)).amax(-1)  # (R, n)
    if n * _SEGMENT < V:
        maxima = torch.cat((maxima, x[:, n * _SEGMENT :].amax(1, keepdim=True)), dim=1)
    start = maxima.argmax(1, keepdim=True) * _SEGMENT
    segment = (start + torch.arange(_SEGMENT, device=x.device)).clamp(max=V - 1)  # (R, segment)
    first: Tensor = start + x.gather(1, segment).argmax(1, keepdim=True)
    return first


def _stable_topk(x: Tensor, k: int) -> Tensor:
    """Return the indices (R, k) of the k largest; `topk` does not define the order of ties, so tied rows are sorted."""
    values, indices = _segmented_topk(x, min(k + 1, x.shape[1]))
    is_tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -math.inf)).any(1)
    indices = indices[:, :k]
    if bool(is_tied.any()):
        x = x[is_tied]
        threshold = values[is_tied, k - 1 : k]
        n_candidates = max(k, int((x >= threshold).sum(1).max()))
        candidates = x.topk(n_candidates, dim=1).indices.sort(dim=1).values
        order = x.gather(1, candidates).sort(dim=1, descending=True, stable=True).indices[:, :k]
        indices[is_tied] = candidates.gather(1, order)
    return indices


def _segmented_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `topk` of each row.

    The k largest are in the k segments with the largest maxima, which is faster to find. If an excluded segment has a
    maximum equal to the last value, k included segments have too, so the last two values are equal.
    """
    R, V = x.shape
    n = V // _SEGMENT
    if n < 4 * k:
        values, indices = x.topk(k, dim=1)
        return values, indices
    segments = x[:, : n * _SEGMENT].unflatten(1, (n, _SEGMENT))
    tail = x[:, n * _SEGMENT :]
    selected = segments.amax(-1).topk(k, dim=1).indices  # (R, k)
    candidates = segments.gather(1, selected[..., None].expand(R, k, _SEGMENT)).flatten(1)
    values, positions = torch.cat((candidates, tail), dim=1).topk(k, dim=1)
    segment = selected.gather(1, positions.div(_SEGMENT, rounding_mode="floor").clamp(max=k - 1))
    indices = segment * _SEGMENT + positions % _SEGMENT
    return values, torch.where(positions < k * _SEGMENT, indices, positions + (n - k) * _SEGMENT)


class SamplingParameters(NamedTuple):
    """The parameters of `Sample`: numbers, or tensors of one element that a captured graph reads."""

    temperature: float | Tensor
    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    log_min_p: float | Tensor | None = None

    @classmethod
    def of(cls, strategy: Sample) -> SamplingParameters:
        """Return the parameters of a strategy; None for filters that it does not use."""
        log_min_p = math.log(strategy.min_p) if strategy.min_p else None
        top_p = strategy.top_p if strategy.top_p is not None and strategy.top_p < 1 else None
        return cls(strategy.temperature, strategy.top_k, top_p, log_min_p)

    def stored_in(self, values: Tensor) -> SamplingParameters:
        """Return the same parameters as elements of a tensor (4,), from which a captured graph reads them."""
        stored = {name: values[i] for i, name in enumerate(self._fields) if getattr(self, name) is not None}
        return self._replace(**stored)


def sample_with_logprobs(
    logits: Float[Tensor, "R V"], parameters: SamplingParameters, uniform: Float[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """Return an id of each row, sampled at `uniform` in [0, 1), and its log-probability under softmax(logits).

    The log-probability is NaN if the logits are NaN, +∞ or all −∞.
    """
    if isinstance(parameters.temperature, Tensor) and runs_triton(logits) and logits.dtype != torch.float64:
        from clearhead.ops.sampling_triton import launch

        return launch(logits, uniform, cast("tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]", parameters))
    ids = sample_inverse_cdf(probabilities(logits, parameters), uniform)
    return ids, log_probs_at(logits, ids[:, None]).squeeze(1)


def probabilities(logits: Float[Tensor, "R V"], parameters: SamplingParameters | Sample) -> Float[Tensor, "R V"]:
    """Return the distribution (R, V) that is sampled from; filtered ids have probability 0."""
    p = SamplingParameters.of(parameters) if isinstance(parameters, Sample) else parameters
    x = logits.double()
    V = x.shape[-1]
    # Relative to the maximum, which is 0 at any temperature: nothing overflows, and min_p is a constant bound.
    x = (x - x.amax(-1, keepdim=True)) / p.temperature
    ordered = x.sort(dim=-1, descending=True).values if isinstance(p.top_k, Tensor) or p.top_p is not None else x
    if p.top_k is not None and (isinstance(p.top_k, Tensor) or p.top_k < V):
        if isinstance(p.top_k, Tensor):
            threshold = ordered.gather(1, (p.top_k.long() - 1).clamp(max=V - 1).expand(len(x), 1))
        else:
            threshold = x.topk(p.top_k, dim=-1).values[:, -1:]
        x = x.masked_fill(x < threshold, -math.inf)
        ordered = ordered.masked_fill(ordered < threshold, -math.inf)
    if p.top_p is not None:
        x = x.masked_fill(x < _top_p_threshold(ordered, p.top_p), -math.inf)
    if p.log_min_p is not None:
        x = x.masked_fill(x < p.log_min_p, -math.inf)
    probs: Tensor = x.softmax(-1)
    return probs


def sample_inverse_cdf(probs: Float[Tensor, "R V"], uniform: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Sample one id per row by inverting its cumulative distribution at `uniform` in [0, 1).

    The result is the first id whose cumulative probability exceeds uniform · total, so an id of probability 0 is
    never sampled.
    """
    cumulative = probs.cumsum(-1)
    height = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, height, right=True).squeeze(-1)
    return ids.clamp(max=probs.shape[-1] - 1)  # only NaN exceeds the end; the caller raises for it


def _top_p_threshold(ordered: Tensor, top_p: float | Tensor) -> Tensor:
    """Return (R, 1) the smallest of the logits, largest first, of the fewest ids with total probability `top_p`."""
    preceding = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)  # total probability of the ids before each
    preceding[:, 0] = 0.0
    n_ids = (preceding < top_p).sum(-1, keepdim=True)  # at least 1
    return ordered.gather(-1, n_ids.clamp(min=1) - 1)
