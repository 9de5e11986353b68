"""Triton kernels that sample an id per row: filters, inverse CDF and log-probability in two launches.

All decisions are made in float64, by the same equations as `clearhead.generation.sampling`, with

    d[i] = (max x − x[i]) / temperature        (V,) ≥ 0; an order of ids that includes ties by rounding
    w[i] = exp(−d[i])                          (V,)
    kept = d ≤ min(d_k, d_p, −log min_p)       (V,)
    d_k  = smallest d[i] with #{j : d[j] ≤ d[i]} ≥ top_k
    d_p  = smallest d[i] with Σ w[j : d[j] ≤ d[i]] ≥ top_p · Σ w[j : d[j] ≤ d_k]
    id   = first i with Σ w[j ≤ i, kept] > uniform · Σ w[kept]

A different order of addition changes a sum by at most V · 2⁻⁵³ of its value, so an id differs from that of the torch
operators only if `uniform` or `top_p` is within about that distance of a step of the cumulative distribution.

The first kernel reads the logits once and computes, per chunk, the maximum and sums of exponentials, and the maxima
of small groups of ids. The second runs one program per row. Without filters, it reads the chunk in which the sampled id
is. With filters, it reads only groups whose maximum is at least a lower bound of the threshold, which is safe because

    top_k   k group maxima are at least the k-th largest group maximum, so k ids are
    top_p   ids with w < (1 − top_p) · Σ w / V have a total below (1 − top_p) · Σ w, so without them top_p is reached
    min_p   the threshold is known

It stores d and w of the ids of these groups (16 bytes per id; all V ids at most) and finds d_k and d_p by bisection.
Few groups are read for a small top_k, but most of them for top_p alone, so that the second kernel then takes longer.

    R rows   V vocabulary   C chunks   G groups   m ids in groups that are read
"""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.ops.pdl import pdl_options, pdl_wait

__all__ = ["launch"]

_CHUNK = 1024  # logits of a program of the first kernel
_GROUP = 16  # ids whose maximum is stored
_BLOCK = 2048  # ids that a program of the second kernel reads at once


@triton.jit
def chunk_statistics(
    logits, temperature, statistics, maxima, V, C, G,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, HAS_GROUPS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute the maximum of a chunk, Σ exp(x − maximum) and Σ exp((x − maximum) / temperature), and group maxima."""
    pdl_wait(USE_PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
    if HAS_GROUPS:
        g = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        tl.store(maxima + row * G + g, tl.max(tl.reshape(x, (CHUNK // GROUP, GROUP)), axis=1), mask=g < G)
    top = tl.max(x, axis=0)
    reference = tl.where(top == -float("inf"), 0.0, top)
    result = statistics + (row * C + chunk) * 3
    tl.store(result, top.to(tl.float64))
    tl.store(result + 1, tl.sum(tl.exp(x - reference), axis=0).to(tl.float64))  # NaN if the logits contain NaN or +∞
    if HAS_WEIGHTS:
        d = (reference.to(tl.float64) - x.to(tl.float64)) / tl.load(temperature)
        tl.store(result + 2, tl.sum(tl.exp(-d), axis=0))


@triton.jit
def _row_statistics(statistics, row, C, CP: tl.constexpr):
    """Return the maxima of the chunks (CP,), the maximum of the row (0 if all are −∞), and log Σ exp x.

    The last is NaN if no id can be sampled: x contains NaN or +∞, or only −∞.
    """
    c = tl.arange(0, CP)
    tops = tl.load(statistics + (row * C + c) * 3, mask=c < C, other=-float("inf"))
    sums = tl.load(statistics + (row * C + c) * 3 + 1, mask=c < C, other=0.0)
    top = tl.max(tops, axis=0)
    log_total = tl.where(top == -float("inf"), float("nan"), top)
    top = tl.where(top == -float("inf"), 0.0, top)
    return tops, top, log_total + tl.log(tl.sum(sums * tl.exp(tops - top), axis=0))


@triton.jit
def _chunk_weights(statistics, row, C, tops, top, t, CP: tl.constexpr):
    """Return Σ w of each chunk (CP,)."""
    c = tl.arange(0, CP)
    sums = tl.load(statistics + (row * C + c) * 3 + 2, mask=c < C, other=0.0)
    return sums * tl.exp((tops - top) / t)


@triton.jit
def _first_above(w, base, height):
    """Return the index of the first element of w (N,) at which base + cumulative sum exceeds height.

    If none does because of rounding, return the first at which the sum is largest. The element is positive.
    """
    i = tl.arange(0, w.shape[0])
    cumulative = base + tl.cumsum(w, axis=0)
    is_above = (cumulative > height) | (cumulative == tl.max(cumulative, axis=0))
    first = tl.min(tl.where((w > 0.0) & is_above, i, w.shape[0]), axis=0)
    return tl.minimum(first, tl.max(tl.where(w > 0.0, i, 0), axis=0))


@triton.jit
def _store_sample(logits, ids, log_probs, row, V, sample, log_total):
    """Store the id and its log-probability, which is NaN if the logits are invalid."""
    sample = tl.where(log_total == log_total, tl.minimum(sample, V - 1), V - 1)
    x = tl.load(logits + row * V + sample).to(tl.float64)
    tl.store(ids + row, sample.to(tl.int64))
    tl.store(log_probs + row, (x - log_total).to(tl.float32))


@triton.jit
def sample_unfiltered(
    logits, temperature, uniform, statistics, ids, log_probs, V, C,
    CHUNK: tl.constexpr, CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Sample an id from all ids of a row: its chunk first, then the id in the chunk."""
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    tops, top, log_total = _row_statistics(statistics, row, C, CP)
    t = tl.load(temperature)
    weights = _chunk_weights(statistics, row, C, tops, top, t, CP)
    height = tl.load(uniform + row) * tl.sum(weights, axis=0)
    chunk = tl.minimum(_first_above(weights, 0.0, height), C - 1)
    before = tl.sum(tl.where(tl.arange(0, CP) < chunk, weights, 0.0), axis=0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + i, mask=i < V, other=-float("inf")).to(tl.float64)
    sample = chunk * CHUNK + _first_above(tl.exp((x - top) / t), before, height)
    _store_sample(logits, ids, log_probs, row, V, sample, log_total)


@triton.jit
def _smallest_reaching(values, weights, n, target, enough, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest of n values up to which the sum of the weights (or the count) is at least `target`.

    A value whose sum is between `target` and `enough` ends the search early. The values are ≥ 0 and given as their
    bits, which have the same order. Each step bisects the bits between `low` and `high`, and moves one of these to the
    nearest value on the other side of the middle, so that the number of steps is about log₂ n, and never more than 64.
    """
    low = tl.zeros((), tl.int64)
    high = tl.full((), 0x7FF0000000000000, tl.int64)  # +∞
    while low < high:
        middle = low + ((high - low) >> 1)
        sums = tl.zeros((BLOCK,), tl.float64 if HAS_WEIGHTS else tl.int32)
        below = tl.zeros((BLOCK,), tl.int64) + low
        above = tl.zeros((BLOCK,), tl.int64) + high
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            v = tl.load(values + i, mask=i < n, other=0x7FF0000000000000)
            is_below = v <= middle
            if HAS_WEIGHTS:
                sums += tl.where(is_below, tl.load(weights + i, mask=i < n, other=0.0), 0.0)
            else:
                sums += is_below.to(tl.int32)
            below = tl.maximum(below, tl.where(is_below, v, low))
            above = tl.minimum(above, tl.where(is_below, high, v))
        reached = tl.sum(sums, axis=0).to(tl.float64)
        if reached >= target:
            high = tl.max(below, axis=0)
            if reached <= enough:
                low = high
        else:
            low = tl.min(above, axis=0)
    return high.to(tl.float64, bitcast=True)


@triton.jit
def _store_distances(x, top, t, values, i, mask):
    """Store the bits of d, and return d."""
    d = (top - x) / t
    tl.store(values + i, d.to(tl.int64, bitcast=True), mask=mask)
    return d


@triton.jit
def _kept_weights(values, weights, i, n, threshold):
    """Return w of elements i, or 0 if they are filtered."""
    d = tl.load(values + i, mask=i < n, other=0x7FF0000000000000).to(tl.float64, bitcast=True)
    return tl.where(d <= threshold, tl.load(weights + i, mask=i < n, other=0.0), 0.0)


@triton.jit
def _kept_total(values, weights, n, threshold, BLOCK: tl.constexpr):
    """Return the sum of the weights that are not filtered; `sample_filtered` repeats it in this order."""
    total = tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        total += tl.sum(_kept_weights(values, weights, start + tl.arange(0, BLOCK), n, threshold), axis=0)
    return total


@triton.jit
def sample_filtered(
    logits, temperature, top_k, top_p, log_min_p, uniform, statistics, maxima, groups, values, weights,
    ids, log_probs, V, C, G,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    GROUP: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Sample an id from the ids of a row that pass the filters."""
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    maxima += row * G
    groups += row * G
    values += row * G * GROUP
    weights += row * G * GROUP
    tops, top, log_total = _row_statistics(statistics, row, C, CP)
    t = tl.load(temperature)
    total = tl.zeros((), tl.float64)
    if HAS_TOP_P and not HAS_TOP_K:
        total = tl.sum(_chunk_weights(statistics, row, C, tops, top, t, CP), axis=0)
    k = tl.zeros((), tl.float64)
    if HAS_TOP_K:
        k = tl.minimum(tl.load(top_k), V)

    # The largest d that may be kept, and the smallest logit.
    if HAS_TOP_K:
        for start in range(0, G, BLOCK):
            g = start + tl.arange(0, BLOCK)
            x = tl.load(maxima + g, mask=g < G, other=-float("inf")).to(tl.float64)
            _store_distances(x, top, t, values, g, g < G)
        tl.debug_barrier()
        bound = _smallest_reaching(values, weights, G, tl.minimum(k, G), 2 * k, False, BLOCK)
        tl.debug_barrier()
    elif HAS_TOP_P:
        bound = -tl.log(0.9 * (1.0 - tl.load(top_p)) * total / V)
    else:
        bound = -tl.load(log_min_p)
    # Smaller by more than the rounding of d and of this line, which may tie logits or reverse them.
    smallest = (top - t * (bound * (1.0 + 1e-12) + 1e-300)).to(tl.float32)

    # Groups with such logits, in order.
    n_groups = tl.zeros((), tl.int32)
    for start in range(0, G, BLOCK):
        g = start + tl.arange(0, BLOCK)
        is_read = (g < G) & (tl.load(maxima + g, mask=g < G, other=-float("inf")) >= smallest)
        tl.store(groups + n_groups + tl.cumsum(is_read.to(tl.int32), axis=0) - 1, g, mask=is_read)
        n_groups += tl.sum(is_read.to(tl.int32), axis=0)
    tl.debug_barrier()

    # d and w of their ids.
    m = n_groups * GROUP
    for start in range(0, m, BLOCK):
        i = start + tl.arange(0, BLOCK)
        id_ = tl.load(groups + i // GROUP, mask=i < m, other=0) * GROUP + i % GROUP
        x = tl.load(logits + row * V + id_, mask=(i < m) & (id_ < V), other=-float("inf")).to(tl.float64)
        d = _store_distances(x, top, t, values, i, i < m)
        tl.store(weights + i, tl.exp(-d), mask=i < m)
    tl.debug_barrier()

    threshold = tl.full((), float("inf"), tl.float64)
    if HAS_TOP_K:
        threshold = _smallest_reaching(values, weights, m, k, k, False, BLOCK)
    if HAS_TOP_P:
        if HAS_TOP_K:
            total = _kept_total(values, weights, m, threshold, BLOCK)
        mass = tl.load(top_p) * total
        threshold = tl.minimum(threshold, _smallest_reaching(values, weights, m, mass, mass, True, BLOCK))
    if HAS_MIN_P:
        threshold = tl.minimum(threshold, -tl.load(log_min_p))

    height = tl.load(uniform + row) * _kept_total(values, weights, m, threshold, BLOCK)
    cumulative = tl.zeros((), tl.float64)
    position = tl.full((), -1, tl.int32)
    for start in range(0, m, BLOCK):
        w = _kept_weights(values, weights, start + tl.arange(0, BLOCK), m, threshold)
        part = tl.sum(w, axis=0)
        if (position < 0) & (cumulative + part > height):
            position = start + _first_above(w, cumulative, height)
        cumulative += part
    position = tl.maximum(position, 0)
    sample = tl.load(groups + position // GROUP) * GROUP + position % GROUP
    _store_sample(logits, ids, log_probs, row, V, sample, log_total)


def launch(
    logits: Tensor, uniform: Tensor, parameters: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return an id (R,) sampled from each row of logits (R, V), and its log-probability (R,) under softmax(logits).

    `uniform` (R,) and the parameters (temperature, top_k, top_p, log min_p), of one element each, are float64.
    """
    temperature, top_k, top_p, log_min_p = parameters
    logits = logits.contiguous()  # after a prefill, a view of the last position
    R, V = logits.shape
    device = logits.device
    C, G = triton.cdiv(V, _CHUNK), triton.cdiv(V, _GROUP)
    is_filtered = not (top_k is None and top_p is None and log_min_p is None)
    statistics = torch.empty(R, C, 3, dtype=torch.float64, device=device)
    maxima = torch.empty((R, G) if is_filtered else (0,), dtype=torch.float32, device=device)
    ids = torch.empty(R, dtype=torch.int64, device=device)
    log_probs = torch.empty(R, dtype=torch.float32, device=device)
    has_weights = not is_filtered or (top_p is not None and top_k is None)
    chunk_statistics[(R, C)](
        logits, temperature, statistics, maxima, V, C, G,
        CHUNK=_CHUNK, GROUP=_GROUP, HAS_GROUPS=is_filtered, HAS_WEIGHTS=has_weights,
        num_warps=4, **pdl_options(logits),
    )  # fmt: skip
    CP = triton.next_power_of_2(C)
    if not is_filtered:
        sample_unfiltered[(R,)](
            logits, temperature, uniform, statistics, ids, log_probs, V, C,
            CHUNK=_CHUNK, CP=CP, num_warps=4, **pdl_options(logits),
        )  # fmt: skip
        return ids, log_probs
    groups = torch.empty(R, G, dtype=torch.int32, device=device)
    values = torch.empty(R, G * _GROUP, dtype=torch.int64, device=device)
    weights = torch.empty(R, G * _GROUP, dtype=torch.float64, device=device)
    top_k_, top_p_, log_min_p_ = (temperature if p is None else p for p in (top_k, top_p, log_min_p))
    sample_filtered[(R,)](
        logits, temperature, top_k_, top_p_, log_min_p_, uniform, statistics, maxima, groups, values, weights,
        ids, log_probs, V, C, G,
        HAS_TOP_K=top_k is not None, HAS_TOP_P=top_p is not None, HAS_MIN_P=log_min_p is not None,
        GROUP=_GROUP, CP=CP, BLOCK=_BLOCK, num_warps=16, **pdl_options(logits),
    )  # fmt: skip
    return ids, log_probs
