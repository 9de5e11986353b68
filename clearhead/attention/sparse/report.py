"""Text and pictures of a plan: computed and skipped pairs, and the predicted time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.attention.sparse.cost_model import AttentionWork, Rates, rates_for
from clearhead.masks import Drawing, causal

if TYPE_CHECKING:
    from clearhead.attention.sparse.plan import Plan

_MAX_ENTRIES = 1 << 22
"""Columns or rows of blocks that are counted at once."""


def explain(plan: Plan, rates: Rates | None = None) -> str:
    """Return the plan as text, with the predicted time at these rates (by default those of its device)."""
    rates = rates_for(plan.device) if rates is None else rates
    has_dense = plan.has_dense_causal or plan.dense_columns is not None
    sparse = [index for index in plan.query_pieces if index.pairs]
    lines = [f"{plan.mask}: {plan.T:,} queries, {plan.S:,} keys, {plan.allowed_pairs:,} pairs allowed"]
    if plan.has_dense_causal:
        lines.append(f"  dense      causal attention over all keys: {plan.dense_pairs:,} pairs")
    elif plan.dense_columns is not None:
        keys = f"{len(plan.dense_columns):,} keys that every query sees, gathered once"
        lines.append(f"  dense      {keys}: {plan.dense_pairs:,} pairs")
    lines += [f"  sparse     {index}" for index in sparse]
    if has_dense + len(sparse) > 1:
        lines.append(f"  merged     {has_dense + len(sparse)} pieces, by their log-sum-exps in float32")
    share = f"{plan.density:.4f} of all"
    if plan.computed_pairs:
        share += f"; {100 * plan.allowed_pairs / plan.computed_pairs:.0f} % of them are allowed"
    lines.append(f"  total      {plan.computed_pairs:,} pairs computed, {share}")
    every_pair_ms = rates.milliseconds(AttentionWork(dense=32.0 * plan.T * plan.S, launches=1), width=64)
    ratio = plan.predicted_ms(heads=32, rates=rates) / max(every_pair_ms, 1e-12)
    setting = f"({rates.name}, 32 heads of width 64)"
    lines.append(f"  predicted  {ratio:.3f} of the time of attention without a mask {setting}")
    return "\n".join(lines)


def draw(plan: Plan, cells: int = 32) -> Drawing:
    """Return a picture of the computed pairs; a cell's shade is the share of its pairs that is computed."""
    T, S, rows, columns = plan.T, plan.S, min(plan.T, cells), min(plan.S, cells)
    counts = torch.zeros(rows, columns, dtype=torch.float64)
    if plan.has_dense_causal:
        causal_shades = torch.tensor(causal().draw(T, S, cells=cells).cells, dtype=torch.float64)
        counts += causal_shades * _cell_sizes(T, rows, S, columns)
    if plan.dense_columns is not None:
        counts += _cell_sizes(T, rows, 1, 1) * _count_per_cell(plan.dense_columns[None].cpu(), S, columns)
    for index in plan.query_pieces:
        blocks = (index.n_total > 0).nonzero().flatten()
        for part in blocks.split(max(1, _MAX_ENTRIES // max(index.max_length, index.M, 1))):
            is_listed = torch.arange(index.max_length, device=part.device) < index.n_total[part][:, None]
            across = torch.where(is_listed, index.columns(part, index.max_length), -1)
            down = _count_per_cell(index.row_indices(part).cpu(), T, rows)
            counts += down.T @ _count_per_cell(across.cpu(), S, columns) / max(index.batch, 1)
    shades = counts / _cell_sizes(T, rows, S, columns) if counts.numel() else counts
    table = tuple([tuple(row) for row in shades.clamp(max=1.0).tolist()])
    return Drawing(f"{plan.mask}, as it is planned", T, S, plan.query_offset, plan.mask.batch_shape, table, T)


def _count_per_cell(indices: Tensor, n: int, cells: int) -> Tensor:
    """Return (R, cells): how many of each row's indices (0 … n − 1; negative ones are ignored) are in each cell."""
    cell = ((indices + 1) * cells - 1).div(max(n, 1), rounding_mode="floor").clamp(min=0)
    counts = torch.zeros(len(indices), cells, dtype=torch.float64)
    return counts.scatter_add_(1, cell, (indices >= 0).to(torch.float64))


def _cell_sizes(T: int, rows: int, S: int, columns: int) -> Tensor:
    """Return (rows, columns): the number of pairs in each cell."""
    heights, widths = ((torch.arange(k + 1) * n // k).diff().to(torch.float64) for n, k in ((T, rows), (S, columns)))
    return heights[:, None] * widths[None, :]
