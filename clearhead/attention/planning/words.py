"""A plan told in words, and drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.attention.planning.cost import Rates, rates_of
from clearhead.attention.planning.lists import Lists
from clearhead.masks import Drawing, causal

if TYPE_CHECKING:
    from clearhead.attention.plan import Plan


def explain(plan: Plan, rates: Rates | None = None) -> str:
    """What is computed, piece by piece, and what it should cost against computing everything."""
    rates = rates_of(plan.device) if rates is None else rates
    pairs = plan.T * plan.S
    lines = [f"{plan.mask}: {plan.T:,} queries, {plan.S:,} keys, {plan.allowed:,} pairs allowed"]
    if plan.triangle:
        lines.append(f"  dense      causal attention over all keys: {plan.dense_pairs:,} pairs")
    elif plan.columns is not None:
        lines.append(
            f"  dense      {len(plan.columns):,} keys that every query sees, gathered once: {plan.dense_pairs:,} pairs"
        )
    lines += [f"  gathered   {_lists(lists)}" for lists in plan.queries if lists.pairs]
    pieces = (plan.triangle or plan.columns is not None) + sum(lists.pairs > 0 for lists in plan.queries)
    if pieces > 1:
        lines.append(f"  merged     {pieces} pieces, by their log-sum-exps in float32")
    needed = f"{100 * plan.allowed / plan.computed if plan.computed else 100:.0f} %"
    lines.append(
        f"  together   {plan.computed:,} pairs computed, {plan.density:.4f} of all; {needed} of them are allowed"
    )
    dense = rates.milliseconds(dense=32.0 * pairs, width=64)
    whole = plan.predicted_ms(heads=32, rates=rates) / max(dense, 1e-12)
    lines.append(
        f"  predicted  {whole:.3f} of the time of attention without a mask ({rates.name}, 32 heads of width 64)"
    )
    return "\n".join(lines)


def _lists(lists: Lists) -> str:
    full = int(lists.full.sum(dtype=torch.int64)) * lists.M
    busy = int((lists.total > 0).sum())
    rows = "neighbouring queries" if lists.rows is None else "queries that look alike"
    runs = lists.segments.shape[1]
    how = "listed one by one" if lists.pool is not None else "in 1 run" if runs == 1 else f"in up to {runs} runs"
    by = "an interval for each query" if lists.bounds is not None else "a bit for each pair"
    tested = f"{full:,} pairs need no test, {lists.pairs - full:,} are tested by {by}"
    if lists.bounds is None and lists.bits is None:
        tested = "no pair is tested"
    elif not full:
        tested = f"every pair is tested, by {by}"
    return f"{busy:,} blocks of {lists.M} {rows}, up to {lists.longest:,} keys each, {how}: {tested}"


def draw(plan: Plan, cells: int = 32) -> Drawing:
    """Of each cell of the picture, the fraction of its pairs that is computed, on average over the mask's batch."""
    T, S = plan.T, plan.S
    batch_shape = plan.mask.batch_shape
    rows, columns = min(T, cells), min(S, cells)
    counts = torch.zeros(rows, columns, dtype=torch.float64)
    if plan.triangle:
        halves = torch.tensor(causal().draw(T, S, cells=cells).cells, dtype=torch.float64)
        counts += halves * _sizes(T, rows, S, columns)
    if plan.columns is not None:
        each = _cells(plan.columns[None].cpu(), S, columns)
        counts += _sizes(T, rows, 1, 1) * each
    for lists in plan.queries:
        blocks = (lists.total > 0).nonzero().flatten()
        patterns = max(lists.batch, 1)
        for part in blocks.split(max(1, (1 << 22) // max(lists.longest, lists.M, 1))):
            inside = torch.arange(lists.longest, device=part.device) < lists.total[part][:, None]
            across = torch.where(inside, lists.columns(part, lists.longest), -1)
            down = _cells(lists.row_indices(part).cpu(), T, rows)
            counts += down.T @ _cells(across.cpu(), S, columns) / patterns
    shades = counts / _sizes(T, rows, S, columns) if counts.numel() else counts
    table = tuple([tuple(row) for row in shades.clamp(max=1.0).tolist()])
    return Drawing(f"{plan.mask}, as it is planned", T, S, plan.offset, batch_shape, table, T)


def _cells(indices: Tensor, n: int, cells: int) -> Tensor:
    """(R, cells) how many of each row's indices (of n; negative ones are none) lie in each cell."""
    cell = ((indices + 1) * cells - 1).div(max(n, 1), rounding_mode="floor").clamp(min=0)
    counts = torch.zeros(len(indices), cells, dtype=torch.float64)
    return counts.scatter_add_(1, cell, (indices >= 0).to(torch.float64))


def _sizes(T: int, rows: int, S: int, columns: int) -> Tensor:
    """(rows, columns) how many pairs each cell has."""
    heights, widths = ((torch.arange(k + 1) * n // k).diff().to(torch.float64) for n, k in ((T, rows), (S, columns)))
    return heights[:, None] * widths[None, :]
