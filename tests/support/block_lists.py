"""The pairs that a block index lists."""

from __future__ import annotations

import torch


def dense(lists):
    """Return the bool tensor (batch, n_rows, n_columns) of a block index; no pair may be listed twice."""
    blocks = torch.arange(lists.n_total.shape[0])
    result = torch.zeros(lists.batch, lists.n_rows + 1, lists.n_columns + 1, dtype=torch.int32)
    if not len(blocks) or not lists.max_length:
        return result[:, :-1, :-1] > 0
    allowed = lists.visible(blocks, lists.max_length)
    rows = lists.row_indices(blocks)
    rows = torch.where(rows < 0, lists.n_rows, rows)[..., None].expand_as(allowed)
    columns = lists.columns(blocks, lists.max_length)[:, None].expand_as(allowed)
    batch = (blocks // lists.N)[:, None, None].expand_as(allowed)
    result.index_put_((batch, rows, columns), allowed.int(), accumulate=True)
    result = result[:, :-1, :-1]
    assert result.max() <= 1
    return result > 0
