"""A plan told in words, and drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from clearhead.attention.planning.lists import Lists
from clearhead.masks import Drawing, allow

if TYPE_CHECKING:
    from clearhead.attention.plan import Plan


def explain(plan: Plan) -> str:
    """What is computed, piece by piece, and what it should cost against computing everything."""
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
    whole = plan.predicted_ms(heads=32) / max(_dense_ms(plan, pairs), 1e-12)
    lines.append(f"  predicted  {whole:.3f} of the time of attention without a mask (32 heads of width 64)")
    return "\n".join(lines)


def _dense_ms(plan: Plan, pairs: int) -> float:
    from clearhead.attention.planning.cost import rates_of

    return rates_of(plan.device).milliseconds(dense=32.0 * pairs, width=64)


def _lists(lists: Lists) -> str:
    full = int(lists.full.sum(dtype=torch.int64)) * lists.M
    busy = int((lists.total > 0).sum())
    rows = "neighbouring queries" if lists.rows is None else "queries that look alike"
    how = (
        "listed one by one"
        if lists.pool is not None
        else f"in at most {lists.segments.shape[1]} progressions"
    )
    tests = "no tests"
    if lists.bounds is not None:
        tests = "an interval for each query"
    elif lists.bits is not None:
        tests = "a bit for each pair"
    return (
        f"{busy:,} blocks of {lists.M} {rows}, up to {lists.longest:,} keys each, {how}: "
        f"{full:,} pairs without a test, {lists.pairs - full:,} with {tests}"
    )


def draw(plan: Plan, cells: int = 32) -> Drawing:
    """The pairs that are computed, as a picture."""
    T, S = plan.T, plan.S
    grid = torch.zeros(max(min(T, cells), 1), max(min(S, cells), 1), dtype=torch.bool)
    rows, columns = grid.shape
    if plan.triangle:
        grid |= torch.ones_like(grid).tril()
    if plan.columns is not None and len(plan.columns):
        grid[:, (plan.columns.cpu() * columns // S).unique()] = True
    for lists in plan.queries:
        blocks = (lists.total > 0).nonzero().flatten()
        for part in blocks.split(max(1, (1 << 22) // max(lists.longest, 1))):
            found = lists.columns(part, lists.longest)
            inside = torch.arange(lists.longest, device=part.device) < lists.total[part][:, None]
            at = torch.where(inside, found * columns // max(S, 1), -1).cpu()
            for row, across in zip(lists.row_indices(part).cpu(), at, strict=True):
                down = (row[row >= 0] * rows // T).unique()
                grid[down[:, None], across[across >= 0].unique()[None]] = True
    return allow(grid).draw(rows, columns)
