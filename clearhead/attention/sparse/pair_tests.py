"""Build the `BlockIndex` of masks without column intervals: by testing pairs.

The rows of a patch of a grid may see the columns of a box only (`patches`), and patches with the same pattern share a
row mask. Of other masks, every pair is tested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from clearhead.attention.sparse.block_index import BlockIndex, pack_bits, ragged_positions
from clearhead.attention.sparse.intervals import RowBlocks
from clearhead.attention.sparse.patches import Boxes, grid_conditions, list_boxes
from clearhead.masks import Grid

PAIRS_AT_ONCE = 1 << 24
_BLOCKS_AT_ONCE = 64


def build_from_tests(row_blocks: RowBlocks) -> BlockIndex:
    """Return the index from testing every pair, a few blocks at a time; columns that no row sees are dropped."""
    M, S = row_blocks.rows.shape[1], row_blocks.stop - row_blocks.first
    columns = torch.arange(row_blocks.first, row_blocks.stop, device=row_blocks.rows.device)[None]
    blocks_at_once = max(1, PAIRS_AT_ONCE // max(1, M * S * row_blocks.batch))
    return _index_of_tests(
        row_blocks, [(blocks, columns) for blocks in _block_numbers(row_blocks).split(blocks_at_once)]
    )


def _block_numbers(row_blocks: RowBlocks) -> Tensor:
    return torch.arange(row_blocks.rows.shape[0], device=row_blocks.rows.device)


def _index_of_tests(row_blocks: RowBlocks, chunks: Iterable[tuple[Tensor, Tensor]]) -> BlockIndex:
    """Return the index from testing pairs; columns that no row sees are dropped.

    Args:
        row_blocks: The rows.
        chunks: Numbers of blocks (n,), in order, and positions of their columns (n or 1, L), −1 for none."""
    M = row_blocks.rows.shape[1]
    counts: list[Tensor] = []
    # For each batch element, per block: its columns (full, then partial), and (columns, M) who sees the partial ones.
    columns: list[list[Tensor]] = [[] for _ in range(row_blocks.batch)]
    visible: list[list[Tensor]] = [[] for _ in range(row_blocks.batch)]
    for blocks, listed in chunks:
        valid = row_blocks.valid[blocks][..., None]
        pair_mask = _test_blocks(row_blocks, row_blocks.padded_rows[blocks], listed)  # (batch, n, M, L)
        pair_mask = pair_mask & valid & (listed >= 0)[:, None]
        seen_by_all = (pair_mask | ~valid).all(2) & pair_mask.any(2)
        seen_by_some = pair_mask.any(2) & ~seen_by_all
        counts.append(torch.stack([seen_by_all.sum(-1), seen_by_some.sum(-1)]))  # (2, batch, n)
        indices = (listed - row_blocks.first).int().expand(len(blocks), -1)
        for b in range(row_blocks.batch):
            block, _, column = torch.stack([seen_by_all[b], seen_by_some[b]], 1).nonzero(as_tuple=True)
            columns[b].append(indices[block, column])
            visible[b].append(pair_mask[b].transpose(1, 2)[seen_by_some[b]])
    n_full, n_partial = torch.cat(counts, 2).flatten(1)  # (batch · N,) each
    total = n_full + n_partial
    begins = total.cumsum(0) - total
    partial_visible = torch.cat([*chain.from_iterable(visible)])
    bounds, bits = _ragged_row_bounds(partial_visible, n_partial), None
    starts = torch.arange(len(total), device=total.device) * M
    if bounds is None:
        bits, starts = pack_bits(partial_visible, n_partial)
    ranges = torch.stack([begins, torch.ones_like(begins), total], 1)[:, None]
    column_ids = torch.cat([*chain.from_iterable(columns)])
    return BlockIndex.of(
        row_blocks,
        n_full,
        n_partial,
        ranges,
        row_mask_start=starts,
        row_bounds=bounds,
        row_bits=bits,
        column_ids=column_ids,
    )


def _test_blocks(row_blocks: RowBlocks, rows: Tensor, columns: Tensor) -> Tensor:
    """Return (batch, n, M, L): whether rows (n, M) see columns (n or 1, L)."""
    row, column = rows[:, :, None], columns.clamp(min=0)[:, None]
    p, j = (column, row) if row_blocks.by_key else (row, column)
    pair_mask = row_blocks.mask.test(p, j, row_blocks.grid)
    shape = (*rows.shape, columns.shape[1])
    return pair_mask.broadcast_to((*row_blocks.mask.batch_shape, *shape)).reshape(row_blocks.batch, *shape)


def build_from_patches(row_blocks: RowBlocks, device: torch.device) -> BlockIndex:
    """Return the index of patches of a grid, whose columns are boxes; pairs outside of the boxes are not tested."""
    conditions = grid_conditions(row_blocks.mask)
    assert conditions is not None  # the patch was chosen by them
    rows, bounds = row_blocks.rows.cpu(), (row_blocks.first, row_blocks.stop)
    n_positions = max(row_blocks.grid.query_offset + row_blocks.n_rows, row_blocks.stop, int(rows.max()) + 1)
    tables = conditions.tables(row_blocks.grid, n_positions, row_blocks.by_key)
    boxes = list_boxes(conditions, row_blocks.patch, tables, rows[:, 0], bounds)
    if conditions.is_exact and row_blocks.batch == 1 and row_blocks.mask.is_structural:
        return _index_of_boxes(row_blocks, boxes, _places_in_patch(row_blocks, conditions.grid))
    indices = None if row_blocks.indices is None else row_blocks.indices.to(device)
    moved = replace(row_blocks, rows=row_blocks.rows.to(device), indices=indices)
    blocks = torch.arange(len(boxes.lengths))
    return _index_of_tests(moved, [(part.to(device), columns.to(device)) for part, columns in _padded(boxes, blocks)])


def _padded(boxes: Boxes, blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some blocks, and their columns (n, L), −1 beyond the end of a list."""
    begins = boxes.lengths.cumsum(0) - boxes.lengths
    for part in blocks.split(_BLOCKS_AT_ONCE):
        x = torch.arange(max(int(boxes.lengths[part].max()), 1))
        is_listed = x < boxes.lengths[part][:, None]
        places = torch.where(is_listed, begins[part][:, None] + x, 0)
        columns = boxes.columns[places] if len(boxes.columns) else torch.zeros_like(places)
        yield part, torch.where(is_listed, columns, -1)


def _places_in_patch(row_blocks: RowBlocks, grid: Grid) -> Tensor:
    """Return the place in its patch of each row (N, M), −1 for padding."""
    place = torch.zeros_like(row_blocks.rows)
    for dim, side in enumerate(row_blocks.patch):
        place = place * side + grid.coordinate(row_blocks.rows, dim) % side
    return torch.where(row_blocks.valid, place, -1)


def _index_of_boxes(row_blocks: RowBlocks, boxes: Boxes, places: Tensor) -> BlockIndex:
    """Return the index of the boxes; blocks with the same pattern share a row mask, and their pairs are tested once."""
    N = len(places)
    _, pattern = torch.cat([boxes.pattern[:, None], places], 1).unique(dim=0, return_inverse=True)
    representatives = torch.full((int(pattern.max()) + 1,), N).scatter_reduce(0, pattern, torch.arange(N), "amin")
    list_of, _ = ragged_positions(boxes.lengths)
    n_full = torch.bincount(list_of[boxes.full], minlength=N)
    n_partial = boxes.lengths - n_full
    visible = []  # (positions, M) what the rows of representatives see of the partial columns
    for part, columns in _padded(boxes, representatives):
        pair_mask = (
            _test_blocks(row_blocks, row_blocks.padded_rows[part], columns)[0] & row_blocks.valid[part][..., None]
        )
        x = torch.arange(columns.shape[1])
        is_partial = (x >= n_full[part][:, None]) & (x < boxes.lengths[part][:, None])
        visible.append(pair_mask.transpose(1, 2)[is_partial])
    bits, starts = pack_bits(torch.cat(visible), n_partial[representatives])
    begins = boxes.lengths.cumsum(0) - boxes.lengths
    return BlockIndex.of(
        row_blocks,
        n_full,
        n_partial,
        torch.stack([begins, torch.ones_like(begins), boxes.lengths], 1)[:, None],
        row_mask_start=starts[pattern],
        row_bits=bits,
        column_ids=(boxes.columns - row_blocks.first).int(),
    )


def _ragged_row_bounds(visible: Tensor, lengths: Tensor) -> Tensor | None:
    """Return (blocks · M, 2) the interval of its block's partial columns each row sees; None if one has gaps."""
    list_of, position = ragged_positions(lengths)
    is_joined = visible[1:] & visible[:-1] & (position[1:] > 0)[:, None]  # both neighbors are visible
    inner = torch.nn.functional.pad(is_joined, (0, 0, 1, 1))
    bounds = torch.zeros(len(lengths), visible.shape[1], 2, dtype=torch.int32, device=visible.device)
    # The positions where a row begins to see columns, and those where it ends.
    for side, joined in enumerate((inner[:-1], inner[1:])):
        element, row = (visible & ~joined).nonzero(as_tuple=True)
        bounds[list_of[element], row, side] = position[element].int() + side
    has_no_gaps = len(element) == int((bounds[..., 1] > 0).sum())  # each row that sees something has one interval
    return bounds.reshape(-1, 2) if has_no_gaps else None
