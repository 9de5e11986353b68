"""From a view of a mask to its `Lists`: by structure where every leaf has some, by testing pairs where one has not."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.attention.planning.atoms import View, atoms_of, fold
from clearhead.attention.planning.columns import (
    MAX_PROGRESSIONS,
    Atoms,
    Residues,
    Stretches,
    stretches_of,
)
from clearhead.attention.planning.lists import Lists, expand, work_order
from clearhead.masks.base import Leaf
from clearhead.masks.structural import Blocks, Causal, Every, Full, Prefix, Stride, Window

_PAIRS_AT_ONCE = 1 << 24
_MAX_SEGMENTS = 12
# Leaves whose answer depends on p − j alone (or on residues and constants, which the signature holds).
_MOVE_ALONG = (Full, Causal, Window, Stride, Every, Prefix, Blocks)


def build(view: View, *, indices: Tensor | None = None, keep_empty: bool = True) -> Lists:
    """The lists of a view. `indices` (N, M) are the rows' indices if the blocks are not simply consecutive rows."""
    atoms = atoms_of(view)
    if atoms is not None:
        found = _structured(view, atoms, indices, keep_empty)
        if found is not None:
            return found
    return _tested(view, indices, keep_empty)


# -- by structure -----------------------------------------------------------------------------------------------------


def _structured(view: View, atoms: Atoms, indices: Tensor | None, keep_empty: bool) -> Lists | None:
    stretches = stretches_of(view, atoms)
    residues = stretches.residues
    sizes = torch.bincount(residues.of, minlength=residues.count)  # members of each class
    every_class = stretches.full.all(-1)
    simple = every_class | ((stretches.full * sizes).sum(-1) <= MAX_PROGRESSIONS)
    full = stretches.full & simple[..., None]
    partial = stretches.seen & ~full
    full_segments = _segments(stretches, full, MAX_PROGRESSIONS, cover=False)
    partial_segments = _segments(stretches, partial, 1, cover=True)
    counts = full_segments[..., 2], partial_segments[..., 2]
    segments = torch.cat([full_segments, partial_segments], 1)
    if segments.shape[1] > _MAX_SEGMENTS:
        return None
    segments[..., 0] -= view.first
    n_full, n_partial = (count.sum(1) for count in counts)
    segments[..., 2] = segments[..., 2].cumsum(1)
    signature = _signature(view, atoms, stretches, partial)
    where, bounds, bits, skip = _describe(
        view, atoms, stretches, full, partial_segments, n_partial, signature
    )
    return Lists(
        rows=None if indices is None else indices.to(torch.int32),
        n_rows=view.n_rows,
        n_columns=view.stop - view.first,
        M=view.rows.shape[1],
        N=view.rows.shape[0],
        batch_shape=view.mask.batch_shape,
        segments=segments.to(torch.int32).contiguous(),
        full=n_full.to(torch.int32),
        total=(n_full + n_partial).to(torch.int32),
        where=where,
        bounds=bounds,
        bits=bits,
        skip=(skip[0], (skip[1] - view.first) % skip[0]) if skip[0] else skip,
        pool=None,
        order=work_order(n_full + n_partial, view.rows.shape[0], keep_empty),
    )


def _segments(stretches: Stretches, on: Tensor, most: int, *, cover: bool) -> Tensor:
    """Progressions (B, n, 3) of start, step, count for the classes that are `on` (B, E, C).

    Stretches with all classes are ranges; those of a few remainders (at most `most`) are progressions, one for each. What
    is left is covered by ranges too if `cover`, and is not there otherwise.
    """
    residues = stretches.residues
    sizes = torch.bincount(residues.of, minlength=residues.count)
    small = ((on * sizes).sum(-1) <= most) & (residues.count > 1)
    ranges = on.any(-1) & ~small if cover else on.all(-1)
    tracks = [_runs(stretches.edges, ranges, None)]
    for kind in range(residues.count):
        if residues.count > 1 and int(sizes[kind]) <= most:
            chosen = on[..., kind] & ~ranges
            if bool(chosen.any()):
                tracks += [_runs(stretches.edges, chosen, (residues, int(r))) for r in residues.members(kind)]
    found = torch.cat(tracks, 1)
    if found.shape[1] == 0:
        return found
    first = (
        (found[..., 2] == 0).to(torch.int8).sort(dim=1, stable=True).indices
    )  # segments that hold something come first
    found = found.gather(1, first[..., None].expand_as(found))
    needed = int((found[..., 2] > 0).sum(1).max()) if found.shape[0] else 0
    return found[:, :needed]


def _runs(edges: Tensor, on: Tensor, residue: tuple[Residues, int] | None) -> Tensor:
    """Neighbouring stretches that are `on` (B, E) as one progression each: (B, n, 3) of start, step, count."""
    low, high = edges[:, :-1], edges[:, 1:]
    bridged = on | (low == high)  # an empty stretch separates nothing
    begins = bridged & ~torch.nn.functional.pad(bridged, (1, -1))
    number = torch.where(bridged, begins.cumsum(1) - 1, -1)
    result = []
    for n in range(int(number.max()) + 1 if number.numel() else 0):
        mine = number == n
        start = torch.where(mine, low, torch.iinfo(torch.int64).max).amin(1)
        stop = torch.where(mine, high, -1).amax(1)
        start, stop = torch.where(mine.any(1), start, 0), torch.where(mine.any(1), stop, 0)
        step = 1
        if residue is not None:
            kinds, remainder = residue
            step = kinds.modulus
            start = start + (remainder + kinds.shift - start) % step
        count = ((stop - start + step - 1) // step).clamp(min=0)
        result.append(torch.stack([start, torch.full_like(start, step), count], 1))
    shape = (edges.shape[0], 0, 3)
    return torch.stack(result, 1) if result else torch.zeros(shape, dtype=torch.int64, device=edges.device)


def _signature(view: View, atoms: Atoms, stretches: Stretches, partial: Tensor) -> Tensor | None:
    """Numbers (B, n) that are equal only for blocks whose partial columns look the same, seen from their first row.

    None where some leaf has no such repetition, so that every block is described by itself.
    """
    if len(atoms) > 30 or not all(isinstance(leaf, _MOVE_ALONG) for leaf, _ in atoms):
        return None
    filled = view.filled
    anchor = filled[:, :1]
    spread = filled - anchor  # (N, M)
    if bool((spread == spread[:1]).all()):
        spread = spread[:, :0]
    phases = [anchor % stretches.residues.modulus]
    for (leaf, swapped), atom in atoms.items():
        if isinstance(leaf, Blocks):
            phases.append(anchor % leaf.size)
        if isinstance(leaf, Every) and not swapped:
            phases.append(anchor % leaf.stride)
        if isinstance(leaf, (Every, Prefix)) and isinstance(
            atom.stop, Tensor
        ):  # it chooses rows, not columns
            mixed = (atom.stop != atom.stop[:, :1]).any(1, keepdim=True)
            phases.append(torch.where(mixed, anchor, -1))
    valid = view.valid.sum(1, keepdim=True)
    rows = torch.cat([spread, valid, *phases], 1).repeat(view.batch, 1)
    low, high = stretches.edges[:, :-1], stretches.edges[:, 1:]
    some = partial.any(-1) & (high > low)
    code = (partial << torch.arange(partial.shape[-1], device=partial.device)).sum(-1)
    anchors = anchor.repeat(view.batch, 1)
    columns = [
        torch.where(some, value, 0) for value in (low - anchors, high - anchors, stretches.flags, code)
    ]
    return torch.cat([rows, *columns], 1)


def _describe(
    view: View,
    atoms: Atoms,
    stretches: Stretches,
    full: Tensor,
    segments: Tensor,
    lengths: Tensor,
    signature: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[int, int]]:
    """Where each block's description begins, the descriptions (bounds or bits), and what is skipped."""
    chosen, member = _representatives(signature, segments.shape[0], segments.device)
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest == 0:
        return torch.zeros_like(lengths), None, None, (0, 0)
    M = view.rows.shape[1]
    pieces: list[tuple[Tensor, Tensor, Tensor]] = []
    ends = segments.clone()
    ends[..., 2] = ends[..., 2].cumsum(1)
    for part in chosen.split(max(1, _PAIRS_AT_ONCE // (M * longest))):
        columns = expand(ends[part], int(lengths[part].max()), None)  # (R, L) positions
        inside = torch.arange(columns.shape[1], device=columns.device) < lengths[part][:, None]
        seen = _exact(view, atoms, part, columns) & inside[:, None]
        seen = seen & view.valid[part % view.rows.shape[0]][..., None]
        seen = seen & ~_listed_as_full(stretches, full, part, columns)[:, None]
        pieces.append((columns, inside, seen))
    return _encode(pieces, lengths[chosen], member, stretches.residues)


def _representatives(signature: Tensor | None, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks that stand for all that look like them, (R,), and for every block which of these is its own, (B,)."""
    if signature is None:
        every = torch.arange(blocks, device=device)
        return every, every
    first: dict[bytes, int] = {}
    member: list[int] = []
    chosen: list[int] = []
    for number, row in enumerate(signature.cpu().numpy()):
        key = row.tobytes()
        if key not in first:
            first[key] = len(chosen)
            chosen.append(number)
        member.append(first[key])
    return torch.tensor(chosen, device=device), torch.tensor(member, device=device)


def _exact(view: View, atoms: Atoms, blocks: Tensor, columns: Tensor) -> Tensor:
    def test(leaf: Leaf, swapped: bool) -> Tensor:
        return atoms[leaf, swapped].test(columns, blocks)

    seen = fold(view.mask, view.by_key, test, torch.logical_and, torch.logical_or, torch.logical_not)
    return seen.broadcast_to((len(blocks), view.rows.shape[1], columns.shape[1]))


def _listed_as_full(stretches: Stretches, full: Tensor, blocks: Tensor, columns: Tensor) -> Tensor:
    """Which of the columns (R, L) are in the full part of their block already."""
    edges = stretches.edges[blocks]
    stretch = (torch.searchsorted(edges, columns.contiguous(), right=True) - 1).clamp(0, full.shape[1] - 1)
    residues = stretches.residues
    shift = residues.shift[blocks][:, None] if isinstance(residues.shift, Tensor) else residues.shift
    kind = residues.of[(columns - shift) % residues.modulus]
    return full[blocks[:, None], stretch, kind]


def _encode(
    pieces: list[tuple[Tensor, Tensor, Tensor]], lengths: Tensor, member: Tensor, residues: Residues | None
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[int, int]]:
    """Bounds if every row's columns are an interval of its list (but for skipped columns), else bits."""
    M = pieces[0][2].shape[1]
    skip = _skipped(pieces, residues)
    bounds = [_intervals(columns, inside, seen, skip) for columns, inside, seen in pieces]
    if all(found is not None for found in bounds):
        table = torch.cat([found for found in bounds if found is not None])  # (R, M, 2)
        return member * M, table.reshape(-1, 2).to(torch.int32).contiguous(), None, skip
    begins = lengths.cumsum(0) - lengths
    words = [_pack(seen)[inside] for _, inside, seen in pieces]  # (columns, W) each
    return begins[member], None, torch.cat(words).contiguous(), (0, 0)


def _skipped(pieces: list[tuple[Tensor, Tensor, Tensor]], residues: Residues | None) -> tuple[int, int]:
    """The one remainder whose columns nobody sees, if that explains every unseen column but those at the ends."""
    if residues is None or residues.modulus == 1 or isinstance(residues.shift, Tensor):
        return 0, 0
    for remainder in range(min(residues.modulus, 64)):
        if int((residues.of == residues.of[remainder]).sum()) != 1:
            continue
        hits = dead = 0
        for columns, inside, seen in pieces:
            mine = (columns % residues.modulus == remainder) & inside
            hits += int(mine.sum())
            dead += int((mine & ~seen.any(1)).sum())
        if hits and hits == dead:
            return residues.modulus, remainder
    return 0, 0


def _intervals(columns: Tensor, inside: Tensor, seen: Tensor, skip: tuple[int, int]) -> Tensor | None:
    """(R, M, 2) where each row's columns begin and end in the list, or None if they have holes."""
    L = seen.shape[2]
    x = torch.arange(L, device=seen.device)
    low = torch.where(seen, x, L).amin(2)
    high = torch.where(seen, x + 1, 0).amax(2)
    ignored = torch.zeros_like(inside) if not skip[0] else columns % skip[0] == skip[1]
    between = (x >= low[..., None]) & (x < high[..., None]) & ~ignored[:, None]
    if bool((between & ~seen).any()):
        return None
    return torch.stack([torch.where(high > 0, low, 0), high], -1)


def _pack(seen: Tensor) -> Tensor:
    """(R, M, L) bools → (R, L, W) int32, bit r % 32 of word r // 32."""
    R, M, L = seen.shape
    W = -(-M // 32)
    seen = torch.nn.functional.pad(seen, (0, 0, 0, W * 32 - M)).reshape(R, W, 32, L)
    weights = (1 << torch.arange(32, device=seen.device))[:, None]
    words = (seen * weights).sum(2)  # int64, 0 … 2³² − 1
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).transpose(1, 2)


# -- by testing pairs -------------------------------------------------------------------------------------------------


def _tested(view: View, indices: Tensor | None, keep_empty: bool) -> Lists:
    """Tests every pair, a few blocks at a time, and keeps the columns that some row sees."""
    M = view.rows.shape[1]
    S = view.stop - view.first
    at_once = max(1, _PAIRS_AT_ONCE // max(1, M * S * view.batch))
    counts: list[Tensor] = []
    columns: list[list[Tensor]] = []
    descriptions: list[list[Tensor]] = []
    for rows in view.filled.split(at_once):
        valid = view.valid[len(counts) * at_once :][: len(rows)]
        seen = _test_blocks(view, rows) & valid[..., None]  # (batch, n, M, S)
        everyone = (seen | ~valid[..., None]).all(2) & seen.any(2)
        someone = seen.any(2) & ~everyone
        counts.append(torch.stack([everyone.sum(-1), someone.sum(-1)]))  # (2, batch, n)
        columns.append(_listed(everyone, someone))
        descriptions.append(_chosen(seen, someone))
    n_full, n_partial = torch.cat(counts, 2).flatten(1)  # (batch · N,) each
    return _irregular(view, indices, keep_empty, (n_full, n_partial), (columns, descriptions))


def _test_blocks(view: View, rows: Tensor) -> Tensor:
    """(batch, n, M, S) for rows (n, M)."""
    flat = rows.reshape(-1, 1)
    at = torch.arange(view.first, view.stop, device=rows.device)[None]
    p, j = (at, flat) if view.by_key else (flat, at)
    seen = view.mask._test(p, j, view.grid)
    seen = seen.broadcast_to((*view.mask.batch_shape, flat.shape[0], at.shape[1]))
    return seen.reshape(view.batch, *rows.shape, at.shape[1])


def _listed(everyone: Tensor, someone: Tensor) -> list[Tensor]:
    """For each batch element the columns of its blocks, full then partial, one block after the other."""
    result = []
    for full, part in zip(everyone, someone, strict=True):
        both = torch.stack([full, part], 1)  # (n, 2, S)
        result.append(both.nonzero()[:, 2].to(torch.int32))
    return result


def _chosen(seen: Tensor, someone: Tensor) -> list[Tensor]:
    """For each batch element the rows' answers at the partial columns, (columns, M) bool."""
    return [s.transpose(1, 2)[some] for s, some in zip(seen, someone, strict=True)]


def _irregular(
    view: View,
    indices: Tensor | None,
    keep_empty: bool,
    counts: tuple[Tensor, Tensor],
    chunks: tuple[list[list[Tensor]], list[list[Tensor]]],
) -> Lists:
    N, M = view.rows.shape
    n_full, n_partial = counts
    pool = torch.cat([chunk[b] for b in range(view.batch) for chunk in chunks[0]])
    answers = torch.cat([chunk[b] for b in range(view.batch) for chunk in chunks[1]])  # (columns, M)
    total = n_full + n_partial
    begins = total.cumsum(0) - total
    segments = torch.stack([begins, torch.ones_like(begins), total], 1)[:, None]
    partial_begins = n_partial.cumsum(0) - n_partial
    bounds = _ragged_intervals(answers, n_partial, partial_begins)
    bits = None if bounds is not None else _pack(answers.T[None])[0].contiguous()
    where = torch.arange(len(total), device=total.device) * M if bounds is not None else partial_begins
    return Lists(
        rows=None if indices is None else indices.to(torch.int32),
        n_rows=view.n_rows,
        n_columns=view.stop - view.first,
        M=M,
        N=N,
        batch_shape=view.mask.batch_shape,
        segments=segments.to(torch.int32).contiguous(),
        full=n_full.to(torch.int32),
        total=total.to(torch.int32),
        where=where,
        bounds=bounds,
        bits=bits if len(answers) else None,
        skip=(0, 0),
        pool=pool,
        order=work_order(total, N, keep_empty),
    )


def _ragged_intervals(answers: Tensor, lengths: Tensor, begins: Tensor) -> Tensor | None:
    """(blocks · M, 2) the interval each row sees of its block's partial columns, or None if some row's has holes."""
    M = answers.shape[1]
    blocks = len(lengths)
    block = torch.repeat_interleave(torch.arange(blocks, device=lengths.device), lengths)  # (columns,)
    x = (torch.arange(len(answers), device=answers.device) - begins[block])[:, None].expand(-1, M)
    into = block[:, None].expand(-1, M)
    far = torch.iinfo(torch.int32).max
    low = torch.full((blocks, M), far, device=answers.device)
    high = torch.zeros((blocks, M), dtype=torch.int64, device=answers.device)
    low = low.scatter_reduce(0, into, torch.where(answers, x, far), "amin")
    high = high.scatter_reduce(0, into, torch.where(answers, x + 1, 0), "amax")
    number = torch.zeros((blocks, M), dtype=torch.int64, device=answers.device).scatter_add(
        0, into, answers.long()
    )
    low = torch.where(high > 0, low, 0)
    if bool((high - low != number).any()):
        return None
    return torch.stack([low, high], -1).reshape(-1, 2).to(torch.int32).contiguous()
