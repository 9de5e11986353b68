"""Build the `BlockIndex` of row blocks: from column intervals if every leaf has them, else by testing all pairs.

The row mask of a block is an interval of its partial columns per row, or else one bit per pair. Blocks with the same
pattern relative to their first row share one row mask."""

from __future__ import annotations

from dataclasses import replace
from operator import and_, invert, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.attention.sparse.block_index import BlockIndex, expand_ranges, length_groups, pack_bits
from clearhead.attention.sparse.intervals import (
    MAX_PROGRESSIONS,
    IntervalPartition,
    Intervals,
    ResidueClasses,
    RowBlocks,
    block_intervals,
    is_visible,
    partition_columns,
    row_intervals,
)
from clearhead.attention.sparse.pair_tests import PAIRS_AT_ONCE, build_from_patches, build_from_tests
from clearhead.masks import Atom, Axis, Blocks, Every, Leaf, fold
from clearhead.masks.regions import KeyInterval

_MAX_RANGES = 12


def build(row_blocks: RowBlocks, device: torch.device) -> BlockIndex:
    """Return the index of row blocks. Pairs that must be tested are tested on `device`; the index is then there."""
    intervals = block_intervals(row_blocks)
    index = None if intervals is None else _build_from_intervals(row_blocks, intervals)
    if index is not None:
        return index
    if row_blocks.patch:
        return build_from_patches(row_blocks, device)
    indices = None if row_blocks.indices is None else row_blocks.indices.to(device)
    return build_from_tests(replace(row_blocks, rows=row_blocks.rows.to(device), indices=indices))


def _build_from_intervals(row_blocks: RowBlocks, intervals: Intervals) -> BlockIndex | None:
    """Return the index from column intervals; None if blocks need too many ranges."""
    partition = partition_columns(row_blocks, intervals)
    residues = partition.residues
    is_simple = partition.full.all(-1) | ((partition.full * residues.sizes).sum(-1) <= MAX_PROGRESSIONS)
    full = partition.full & is_simple[..., None]
    partial = partition.visible & ~full
    full_ranges = _column_ranges(partition, full, MAX_PROGRESSIONS, cover=False)
    partial_ranges = _column_ranges(partition, partial, 1, cover=True)
    if full_ranges.shape[1] + partial_ranges.shape[1] > _MAX_RANGES:
        return None
    row_mask = _build_row_mask(row_blocks, intervals, partition, full, partial, partial_ranges)
    modulus, residue = row_mask.get("skipped_residue", (0, 0))
    for ranges in (full_ranges, partial_ranges):
        ranges[..., 0] -= row_blocks.first
    if modulus:
        residue = (residue - row_blocks.first) % modulus
        partial_ranges = _without_residue(partial_ranges, modulus, residue)
        row_mask["skipped_residue"] = modulus, residue
    n_full, n_partial = (ranges[..., 2].sum(1) for ranges in (full_ranges, partial_ranges))
    ranges = torch.cat([full_ranges, partial_ranges], 1)
    ranges[..., 2] = ranges[..., 2].cumsum(1)
    return BlockIndex.of(row_blocks, n_full, n_partial, ranges, **row_mask)


def _column_ranges(partition: IntervalPartition, on: Tensor, most: int, *, cover: bool) -> Tensor:
    """Return progressions (B, n, 3) of start, step, count for the residue classes that are `on` (B, E, C).

    Intervals with all classes become ranges; those with at most `most` residues become one progression per residue.
    The other intervals are covered by ranges too if `cover`, else ignored."""
    residues = partition.residues
    is_small = ((on * residues.sizes).sum(-1) <= most) & (residues.count > 1)
    is_range = on.any(-1) & ~is_small if cover else on.all(-1)
    tracks = [_runs(partition.edges, is_range, None)]
    for residue_class, size in enumerate(residues.sizes.tolist() if residues.count > 1 else ()):
        selected = on[..., residue_class] & ~is_range
        if size <= most and bool(selected.any()):
            members = (residues.class_of == residue_class).nonzero().flatten().tolist()
            tracks += [_runs(partition.edges, selected, (residues, residue)) for residue in members]
    ranges = torch.cat(tracks, 1)
    # Non-empty ranges come first.
    order = (ranges[..., 2] == 0).to(torch.int8).sort(dim=1, stable=True).indices
    ranges = ranges.gather(1, order[..., None].expand_as(ranges))
    needed = int((ranges[..., 2] > 0).sum(1).max()) if ranges.shape[0] else 0
    return ranges[:, :needed]


def _without_residue(ranges: Tensor, modulus: int, residue: int) -> Tensor:
    """Return ranges (B, n, 3) of columns as ranges of their numbers among the columns that are not ≡ residue.

    See `BlockIndex.skipped_residue`. A range becomes a range; a progression whose step is the modulus either contains
    no such column, or only such columns."""
    start, step, count = ranges.unbind(-1)
    position = start - (residue + 1 - modulus)  # relative to the column after an omitted one: never negative
    number, stop = (x - x // modulus for x in (position, position + count))
    progression_count = torch.where(position % modulus == modulus - 1, 0, count)
    return torch.stack([number, step - step // modulus, torch.where(step == 1, stop - number, progression_count)], -1)


def _runs(edges: Tensor, on: Tensor, residue: tuple[ResidueClasses, int] | None) -> Tensor:
    """Join adjacent intervals that are `on` (B, E) into one progression each: (B, n, 3) of start, step, count."""
    low, high = edges[:, :-1], edges[:, 1:]
    is_bridged = on | (low == high)  # an empty interval separates nothing
    begins = is_bridged & ~torch.nn.functional.pad(is_bridged, (1, -1))
    run = torch.where(is_bridged, begins.cumsum(1) - 1, -1)
    runs = []
    for n in range(int(run.max()) + 1 if run.numel() else 0):
        is_member = run == n
        start = torch.where(is_member, low, torch.iinfo(torch.int64).max).amin(1)
        stop = torch.where(is_member, high, -1).amax(1)
        start, stop = torch.where(is_member.any(1), start, 0), torch.where(is_member.any(1), stop, 0)
        step = 1
        if residue is not None:
            classes, remainder = residue
            step = classes.modulus
            start = start + (remainder + classes.shift - start) % step
        count = ((stop - start + step - 1) // step).clamp(min=0)
        runs.append(torch.stack([start, torch.full_like(start, step), count], 1))
    shape = (edges.shape[0], 0, 3)
    return torch.stack(runs, 1) if runs else torch.zeros(shape, dtype=torch.int64, device=edges.device)


# -- row masks: what each row sees of the partial columns --------------------------------------------------------------


class _Group(NamedTuple):
    """Representative blocks with lists of similar length, per list position or per run with equal visibility.

    `members` (R,) are indices of representatives. For run X of a list: `columns` (R, X) its first column, `position`
    (R, X) int32 its first list position, `width` (R, X) int32 its number of positions (0 beyond the list), and
    `visible` (R, M, X) whether a row sees it."""

    members: Tensor
    columns: Tensor
    position: Tensor
    width: Tensor
    visible: Tensor


def _build_row_mask(
    row_blocks: RowBlocks,
    intervals: Intervals,
    partition: IntervalPartition,
    full: Tensor,
    partial: Tensor,
    ranges: Tensor,
) -> dict[str, Any]:
    """Return the row mask of the partial ranges (B, n, 3) of start, step, count, as fields of `BlockIndex`.

    These are `row_mask_start`, and `row_bounds` with `skipped_residue`, or `row_bits`."""
    blocks, n_ranges, _ = ranges.shape
    lengths = ranges[..., 2].sum(1)
    if not n_ranges or not bool((lengths > 0).any()):
        return {"row_mask_start": torch.zeros_like(lengths)}
    signature = _signature(row_blocks, intervals, partition, partial)
    representatives, representative_of = _representatives(signature, blocks, ranges.device)
    is_mixed = bool((full.any(-1) & partial.any(-1)).any())  # a range of partial columns may contain full ones
    by_range = not is_mixed and all(interval.modulus == 1 for interval in intervals.values())
    groups = []
    order = lengths[representatives].sort(descending=True, stable=True).indices
    sizes = [n for n in lengths[representatives][order].tolist() if n]  # of the non-empty lists
    for first, end in length_groups(sizes, row_blocks.rows.shape[1], pairs=PAIRS_AT_ONCE, share=0.5):
        members = order[first:end]
        group_blocks = representatives[members]
        exact = row_intervals(row_blocks, group_blocks)
        columns, position, width = _list_positions(row_blocks, exact, ranges[group_blocks], by_range)
        is_excluded = width == 0
        if is_mixed:
            is_excluded = is_excluded | _is_full(partition, full, group_blocks, columns)
        pair_mask = _visible(row_blocks, exact, columns) & ~is_excluded[:, None]
        if row_blocks.indices is not None or row_blocks.n_rows % row_blocks.rows.shape[1]:
            pair_mask = pair_mask & row_blocks.valid[group_blocks % row_blocks.rows.shape[0]][..., None]
        groups.append(_Group(members, columns, position.int(), width.int(), pair_mask))
    return _encode(groups, lengths[representatives], representative_of, partition.residues)


def _list_positions(
    row_blocks: RowBlocks, intervals: Intervals, ranges: Tensor, by_range: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns (R, X) of the lists, their positions and widths.

    There is one entry per list position or, if `by_range` and shorter, one per run in which visibility is constant."""
    starts, counts = ranges[..., 0], ranges[..., 2]
    ends = counts.cumsum(1)
    total = ends[:, -1:]
    max_length = int(total.max())
    edges = [x for interval in intervals.values() for x in (interval.start, interval.stop)]
    cuts = [x for x in edges if isinstance(x, Tensor)]
    fixed = [x for x in edges if not isinstance(x, Tensor)]
    if not by_range or max_length <= sum(cut.shape[1] for cut in cuts) + len(fixed) + ends.shape[1] + 1:
        position = torch.arange(max_length, device=ranges.device).expand(len(ranges), -1)
        listed = torch.cat([ranges[..., :2], ends[..., None]], -1)
        return expand_ranges(listed, max_length, None), position, (position < total).long()
    cuts += [torch.full_like(total, x) for x in fixed]
    changes = torch.cat(cuts, 1).clamp(row_blocks.first, row_blocks.stop)  # columns where visibility changes …
    positions = (changes[..., None] - starts[:, None]).clamp(min=0).minimum(counts[:, None]).sum(-1)  # … in the list
    positions = torch.cat([torch.zeros_like(total), positions, ends], 1).sort(1).values
    begin, width = positions[:, :-1], positions.diff(dim=1)
    range_of = (begin[..., None] >= ends[:, None]).sum(-1).clamp(max=ends.shape[1] - 1)
    columns = begin + (starts - (ends - counts)).gather(1, range_of)
    return columns, begin, width


def _signature(
    row_blocks: RowBlocks, intervals: Intervals, partition: IntervalPartition, partial: Tensor
) -> Tensor | None:
    """Return numbers (B, n), equal only for blocks whose partial columns are equal relative to their first row.

    None if the expression has too many leaves to encode: then every block gets a separate row mask."""
    if len(intervals) > 30:
        return None
    anchor = row_blocks.ends[:, :1].repeat(row_blocks.batch, 1)  # (B, 1)
    residues = partition.residues
    shift = residues.shift[:, None] if isinstance(residues.shift, Tensor) else residues.shift
    phases = [row_blocks.valid.sum(1, keepdim=True).repeat(row_blocks.batch, 1), (anchor - shift) % residues.modulus]
    if row_blocks.indices is not None:
        row_distance = row_blocks.padded_rows - row_blocks.padded_rows[:, :1]  # (N, M)
        if bool((row_distance != row_distance[:1]).any()):
            phases.append(row_distance.repeat(row_blocks.batch, 1))
    for (leaf, swapped), interval in intervals.items():
        if isinstance(leaf, Blocks):
            phases.append(anchor % leaf.size)
        elif isinstance(leaf, Every) and not swapped:
            phases.append(anchor % leaf.step)
        elif isinstance(leaf, Axis) and isinstance(leaf.mask, Leaf) and leaf.mask.by_distance:
            phases.append(anchor % leaf.grid.slab)
        elif not leaf.by_distance:
            phases.append(_unique_if_rows_differ(interval, len(anchor), anchor.device))
    low, high = partition.edges[:, :-1], partition.edges[:, 1:]
    has_partial = partial.any(-1) & (high > low)
    code = (partial << torch.arange(partial.shape[-1], device=partial.device)).sum(-1)
    columns = [torch.where(has_partial, value, 0) for value in (low - anchor, high - anchor, partition.flags, code)]
    return torch.cat([*phases, *columns], 1)


def _unique_if_rows_differ(interval: KeyInterval, blocks: int, device: torch.device) -> Tensor:
    """Return (B, 1): a unique number for a block whose rows differ, −1 if all rows see the same interval."""
    differ = torch.zeros(blocks, 1, dtype=torch.bool, device=device)
    for value in (interval.start, interval.stop):
        if isinstance(value, Tensor):
            differ = differ | (value != value[:, :1]).any(1, keepdim=True)
    return torch.where(differ, torch.arange(blocks, device=device)[:, None], -1)


def _representatives(signature: Tensor | None, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return one block per distinct signature (R,), and the index of its representative for every block (B,)."""
    if signature is None:
        return torch.arange(blocks, device=device), torch.arange(blocks, device=device)
    rows = signature.cpu().contiguous()
    data, width = rows.numpy().tobytes(), rows.shape[1] * rows.element_size()
    keys = [data[start : start + width] for start in range(0, blocks * width, width)]
    first: dict[bytes, int] = {}
    for number, key in enumerate(keys):
        first.setdefault(key, number)
    index = {key: i for i, key in enumerate(first)}
    representative_of = [index[key] for key in keys]
    return torch.tensor(list(first.values()), device=device), torch.tensor(representative_of, device=device)


def _visible(row_blocks: RowBlocks, intervals: Intervals, columns: Tensor) -> Tensor:
    """Return (R, M, X): whether a row sees a column."""

    def leaf(atom: Atom) -> Tensor:
        return is_visible(intervals[atom], columns)

    pair_mask: Tensor = fold(row_blocks.mask, leaf=leaf, and_=and_, or_=or_, not_=invert, swapped=row_blocks.by_key)
    return pair_mask.broadcast_to((columns.shape[0], row_blocks.rows.shape[1], columns.shape[1]))


def _is_full(partition: IntervalPartition, full: Tensor, blocks: Tensor, columns: Tensor) -> Tensor:
    """Return which of the columns (R, L) belong to the full part of their block."""
    edges = partition.edges[blocks]
    interval = (torch.searchsorted(edges, columns.contiguous(), right=True) - 1).clamp(0, full.shape[1] - 1)
    residues = partition.residues
    shift = residues.shift[blocks][:, None] if isinstance(residues.shift, Tensor) else residues.shift
    residue_class = residues.class_of[(columns - shift) % residues.modulus]
    return full[blocks[:, None], interval, residue_class]


def _encode(
    groups: list[_Group], lengths: Tensor, representative_of: Tensor, residues: ResidueClasses
) -> dict[str, Any]:
    """Return bounds if every row's columns are an interval of its list (up to skipped columns), else bits."""
    M = groups[0].visible.shape[1]
    skipped_residue = _skipped_residue(groups, residues)
    table = torch.zeros(len(lengths), M, 2, dtype=torch.int32, device=lengths.device)
    for group in groups:
        bounds = _row_bounds(group, skipped_residue)
        if bounds is None:
            break
        table[group.members] = bounds
    else:
        return {
            "row_mask_start": representative_of * M,
            "row_bounds": table.reshape(-1, 2),
            "skipped_residue": skipped_residue,
        }
    order = torch.cat([*(group.members for group in groups), (lengths == 0).nonzero().flatten()])
    visible = []  # (positions, M) what the rows see of every position of the concatenated lists
    for group in groups:
        is_listed = group.width > 0
        visible.append(group.visible.transpose(1, 2)[is_listed].repeat_interleave(group.width[is_listed], dim=0))
    bits, begins = pack_bits(torch.cat(visible), lengths[order])
    starts = torch.zeros_like(lengths)
    starts[order] = begins
    return {"row_mask_start": starts[representative_of], "row_bits": bits}


def _skipped_residue(groups: list[_Group], residues: ResidueClasses) -> tuple[int, int]:
    """Return the (modulus, residue) of which no row sees any listed column; (0, 0) if there is none."""
    if residues.modulus == 1 or isinstance(residues.shift, Tensor):
        return 0, 0
    single = (residues.sizes[residues.class_of[:64]] == 1).nonzero().flatten().tolist()
    hidden = [~group.visible.any(1) for group in groups] if single else []
    for residue in single:
        has_residue = [(group.columns % residues.modulus == residue) & (group.width > 0) for group in groups]
        is_hidden = [mask & hidden_mask for mask, hidden_mask in zip(has_residue, hidden, strict=True)]
        if any(mask.any() for mask in has_residue) and all(map(torch.equal, has_residue, is_hidden)):
            return residues.modulus, residue
    return 0, 0


def _row_bounds(group: _Group, skipped_residue: tuple[int, int]) -> Tensor | None:
    """Return (R, M, 2) int32 begin and end of each row's columns in the list without skipped ones.

    Returns None if the columns of a row are not one interval.
    """
    pair_mask, position, width = group.visible, group.position[:, None], group.width[:, None]
    L = int((position + width).max())
    high = (pair_mask * (position + width)).amax(2)  # 0: sees nothing
    low = torch.where(high > 0, L - (pair_mask * (L - position)).amax(2), 0)
    modulus, residue = skipped_residue
    if modulus:  # then every position is a separate run
        counted = (group.columns % modulus != residue).cumsum(1)
        before = torch.nn.functional.pad(counted, (1, 0)).int()  # (R, L + 1)
        low, high = (before.gather(1, bound.long()) for bound in (low, high))
    if bool(((pair_mask * width).sum(2, dtype=torch.int32) != high - low).any()):
        return None
    return torch.stack([low, high], -1)
