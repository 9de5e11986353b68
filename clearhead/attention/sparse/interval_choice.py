"""Calls of the kernel of row intervals: which masks it runs, whether it is predicted to be faster, and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead._core.caches import CACHES
from clearhead.attention.inputs import AttentionInputs, mask_to_bhts, to_bhtd
from clearhead.attention.scores import SoftCapped
from clearhead.attention.sparse import interval_cpu
from clearhead.attention.sparse.cost_model import AttentionWork, rates_for
from clearhead.attention.sparse.interval_op import attend_intervals, attend_intervals_in_graph
from clearhead.attention.sparse.plan import sdpa_work
from clearhead.attention.sparse.row_intervals import (
    MAX_SIZE,
    ROW_INTERVALS,
    RowIntervals,
    estimate_pairs,
    intervals_of,
)
from clearhead.masks import Causal, Full, Or
from clearhead.masks.pair_interval import PairIntervals

_FULL = Full()

IntervalBounds = tuple[tuple[tuple[int, ...], bool], ...]
"""The first seven fields of each `PairInterval`, and whether its pairs do not depend on data."""


def usable_intervals(inputs: AttentionInputs) -> PairIntervals | None:
    """Return the mask as intervals if the kernel of row intervals runs the call, else None."""
    from clearhead.attention.sparse.kernel import blocking_for  # which imports this module

    bias = inputs.bias
    modifies_scores = inputs.distance_bias is not None or type(inputs.scores) is SoftCapped
    mask = _FULL if inputs.mask is None and modifies_scores else inputs.mask
    if mask is None or (bias is not None and bias.requires_grad):
        return None
    is_cuda = inputs.q.is_cuda
    if mask.is_structural and not is_cuda and not modifies_scores:
        return None  # the plan of a structural mask is cached, and its kernel for CPUs is faster
    if not torch.compiler.is_compiling() and max(inputs.T + inputs.query_offset, inputs.S) > MAX_SIZE:
        return None
    if len(inputs.q.shape) != 4 and mask.batch_shape:
        return None
    if not torch.compiler.is_compiling() and 0 in mask.batch_shape:
        return None
    intervals = intervals_of(mask)
    if torch.compiler.is_compiling() and intervals is not None and any([len(i.bounds) > 0 for i in intervals]):
        return None  # operators of graphs have no argument for them
    if intervals is None or not mask.is_structural or torch.compiler.is_compiling() or modifies_scores:
        return intervals
    parts = mask.parts if isinstance(mask, Or) else (mask,)
    if any([isinstance(part, Causal) for part in parts]):  # which a dense kernel computes, if there is one
        has_dense = inputs.T == inputs.S and inputs.query_offset == 0 and blocking_for(inputs).dense_causal
        return None if has_dense else intervals
    if len(intervals) > 1 and not _is_short(inputs, intervals):
        return None  # a plan splits long rows among several programs
    return intervals


def _is_short(inputs: AttentionInputs, intervals: PairIntervals) -> bool:
    """Return whether the kernel of row intervals takes less time than the launches of a plan."""
    from clearhead.attention.sparse.kernel import work_key  # which imports this module

    heads, width, backward, dtype, _ = work_key(inputs)
    rates = rates_for(inputs.q.device, dtype)
    bounds = tuple([(interval[:7], interval.ids is None and not interval.bounds) for interval in intervals])
    pairs = _expected_pairs(bounds, inputs.T, inputs.S, inputs.query_offset) * heads
    interval_ms = rates.interval_ms(pairs=pairs, rows=inputs.T * heads, width=width, backward=backward)
    return interval_ms < (rates.training if backward else rates.forward).plan_host


def row_intervals_for(inputs: AttentionInputs, intervals: PairIntervals) -> RowIntervals:
    """Return the row intervals of a validated call."""
    mask = _FULL if inputs.mask is None else inputs.mask
    return ROW_INTERVALS.get(intervals, mask.versions, inputs.T, inputs.S, inputs.query_offset, inputs.q.device)


def intervals_beat_sdpa_on_cpu(inputs: AttentionInputs, rows: RowIntervals) -> bool:
    """Return whether the kernel of row intervals is predicted to be faster than SDPA; reads the intervals."""
    from clearhead.attention.sparse.kernel import work_key  # which imports this module

    heads, width, backward, dtype, sdpa_dtype = work_key(inputs)
    sparse_rates, sdpa_rates = (rates_for(inputs.q.device, kind) for kind in (dtype, sdpa_dtype))
    pairs, blocks = interval_cpu.work(rows, inputs.T)
    heads_per_pattern = heads // max(rows.bounds.shape[0], 1)
    sparse_work = AttentionWork(partial=pairs * heads_per_pattern, launches=blocks)
    sparse_ms = sparse_rates.milliseconds(sparse_work, width=width, backward=backward)
    assert inputs.mask is not None
    work = sdpa_work(inputs.mask, inputs.T, inputs.S, heads, inputs.q.device)
    return sparse_ms < sdpa_rates.milliseconds(work, width=width, backward=backward)


def intervals_beat_sdpa(inputs: AttentionInputs, intervals: PairIntervals) -> bool:
    """Return whether the kernel of row intervals is predicted to be faster than SDPA on a GPU, without reading data."""
    from clearhead.attention.sparse.kernel import work_key  # which imports this module

    work, T, S, device = work_key(inputs), inputs.T, inputs.S, inputs.q.device
    bounds = tuple([(interval[:7], interval.ids is None and not interval.bounds) for interval in intervals])
    sparse_ms, least_sdpa_ms = _predicted_ms(bounds, T, S, inputs.query_offset, work, device)
    if sparse_ms < least_sdpa_ms:
        return True  # whatever its mask costs as a tensor
    assert inputs.mask is not None
    heads, width, backward, _, sdpa_dtype = work
    sdpa_ms = rates_for(device, sdpa_dtype).sdpa_ms(
        sdpa_work(inputs.mask, T, S, heads, device), width=width, backward=backward
    )
    return sparse_ms < sdpa_ms


@CACHES.lru(1024)
def _predicted_ms(
    bounds: IntervalBounds,
    T: int,
    S: int,
    query_offset: int,
    work: tuple[int, int, bool, torch.dtype, torch.dtype],
    device: torch.device,
) -> tuple[float, float]:
    """Return the predicted time of the kernel of row intervals, and of SDPA without building the mask."""
    heads, width, backward, dtype, sdpa_dtype = work
    pairs = _expected_pairs(bounds, T, S, query_offset) * heads
    sparse_ms = rates_for(device, dtype).interval_ms(pairs=pairs, rows=T * heads, width=width, backward=backward)
    least = AttentionWork(masked=float(T * S * heads), launches=1)
    return sparse_ms, rates_for(device, sdpa_dtype).sdpa_ms(least, width=width, backward=backward)


def _expected_pairs(bounds: IntervalBounds, T: int, S: int, query_offset: int) -> float:
    """Return about how many pairs the kernel computes per head, without reading data.

    Documents and intervals per query rarely span a sequence, so their pairs count half. If one does, the kernel still
    takes less time than SDPA with a mask as a tensor.
    """
    pairs = 0.0
    for interval, is_exact in bounds:
        within_bounds = estimate_pairs((interval,), T, S, query_offset)
        pairs += within_bounds if is_exact else within_bounds / 2
    return pairs


def run_intervals(inputs: AttentionInputs, rows: RowIntervals | None) -> Tensor:
    """Run the kernel of row intervals; `rows` is None while a graph is compiled, which computes them."""
    dot = inputs.dot_product()
    assert dot is not None
    q, lead = dot.q, inputs.q.shape[:-3]
    k, v = inputs.k, inputs.v
    bias = None if inputs.bias is None else bias_bhts(inputs, lead)
    modification = (inputs.scaled_distance_bias(), dot.cap)
    if len(lead) != 1:
        q, k, v = to_bhtd(q), to_bhtd(k), to_bhtd(v)
    if rows is not None:
        out = attend_intervals(q, k, v, bias, rows, dot.scale, *modification)
    else:
        intervals = usable_intervals(inputs)
        assert intervals is not None
        out = attend_intervals_in_graph(q, k, v, bias, intervals, inputs.query_offset, dot.scale, *modification)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])


def bias_bhts(inputs: AttentionInputs, lead: torch.Size) -> Tensor:
    """Return the bias with four dimensions, divided by the temperature."""
    bias = inputs.scaled_bias()
    if len(lead) != 1 and bias.requires_grad:
        bias = bias.to(inputs.acc_dtype)  # before it is expanded, so that its gradient is summed in this dtype
    return mask_to_bhts(bias, lead)
