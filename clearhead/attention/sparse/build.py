"""From a view of a mask to its `Lists`: by structure where every leaf has some, by testing pairs where one has not.

What the rows of a block see of its partial columns is an interval of the list for each row, at worst a bit a pair.
Blocks that look alike, seen from their first row, are described once."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from operator import and_, invert, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.attention.sparse import intervals as seen_by
from clearhead.attention.sparse.block_index import Lists, alike, expand, pack, ragged
from clearhead.attention.sparse.intervals import MAX_PROGRESSIONS, Residues, Spans, Stretches, View
from clearhead.masks import Atom, Blocks, Every, fold
from clearhead.masks.regions import Keys

_MAX_SEGMENTS = 12
_PAIRS_AT_ONCE = 1 << 24


def build(view: View, device: torch.device) -> Lists:
    """The lists of a view. What must be tested pair by pair is tested on `device`; the lists are then there."""
    spans = seen_by.outline_of(view)
    found = None if spans is None else _structured(view, spans)
    if found is not None:
        return found
    indices = None if view.indices is None else view.indices.to(device)
    return _tested(replace(view, rows=view.rows.to(device), indices=indices))


def _structured(view: View, spans: Spans) -> Lists | None:
    stretches = seen_by.stretches_of(view, spans)
    residues = stretches.residues
    simple = stretches.full.all(-1) | ((stretches.full * residues.sizes).sum(-1) <= MAX_PROGRESSIONS)
    full = stretches.full & simple[..., None]
    partial = stretches.seen & ~full
    full_segments = _segments(stretches, full, MAX_PROGRESSIONS, cover=False)
    partial_segments = _segments(stretches, partial, 1, cover=True)
    if full_segments.shape[1] + partial_segments.shape[1] > _MAX_SEGMENTS:
        return None
    marks = _describe(view, spans, stretches, full, partial, partial_segments)
    modulus, residue = marks.get("skip", (0, 0))
    for found in (full_segments, partial_segments):
        found[..., 0] -= view.first
    if modulus:
        residue = (residue - view.first) % modulus
        partial_segments = _thinned(partial_segments, modulus, residue)
        marks["skip"] = modulus, residue
    n_full, n_partial = (found[..., 2].sum(1) for found in (full_segments, partial_segments))
    segments = torch.cat([full_segments, partial_segments], 1)
    segments[..., 2] = segments[..., 2].cumsum(1)
    return Lists.of(view, n_full, n_partial, segments, **marks)


def _segments(stretches: Stretches, on: Tensor, most: int, *, cover: bool) -> Tensor:
    """Progressions (B, n, 3) of start, step, count for the classes that are `on` (B, E, C).

    Stretches with all classes are ranges; those of a few remainders (at most `most`) are progressions, one for each.
    What is left is covered by ranges too if `cover`, and is not there otherwise."""
    residues = stretches.residues
    small = ((on * residues.sizes).sum(-1) <= most) & (residues.count > 1)
    ranges = on.any(-1) & ~small if cover else on.all(-1)
    tracks = [_runs(stretches.edges, ranges, None)]
    for kind, size in enumerate(residues.sizes.tolist() if residues.count > 1 else ()):
        chosen = on[..., kind] & ~ranges
        if size <= most and bool(chosen.any()):
            remainders = (residues.of == kind).nonzero().flatten().tolist()
            tracks += [_runs(stretches.edges, chosen, (residues, r)) for r in remainders]
    found = torch.cat(tracks, 1)
    # Segments that hold something come first.
    first = (found[..., 2] == 0).to(torch.int8).sort(dim=1, stable=True).indices
    found = found.gather(1, first[..., None].expand_as(found))
    needed = int((found[..., 2] > 0).sum(1).max()) if found.shape[0] else 0
    return found[:, :needed]


def _thinned(segments: Tensor, modulus: int, residue: int) -> Tensor:
    """Segments (B, n, 3) of columns as segments of their numbers among those that are not ≡ residue (see `Lists.skip`).

    A range becomes a range; a progression whose step is the modulus either has no such column, or no other."""
    start, step, count = segments.unbind(-1)
    place = start - (residue + 1 - modulus)  # counted from just after a column that is left out: never below 0
    number, stop = (at - at // modulus for at in (place, place + count))
    alone = torch.where(place % modulus == modulus - 1, 0, count)
    return torch.stack([number, step - step // modulus, torch.where(step == 1, stop - number, alone)], -1)


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


# -- what rows see of the partial columns ------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Some representatives with lists of about the same length, place by place or in runs that all rows treat alike."""

    chosen: Tensor  # (R,) which of the representatives
    columns: Tensor  # (R, X) the first column of a run
    at: Tensor  # (R, X) int32: its place in the list
    width: Tensor  # (R, X) int32: how many places the run has; 0 beyond the list
    seen: Tensor  # (R, M, X)


def _describe(
    view: View, spans: Spans, stretches: Stretches, full: Tensor, partial: Tensor, segments: Tensor
) -> dict[str, Any]:
    """What `Lists` has of the partial segments (B, n, 3) of start, step, count: `where` each block's description begins
    in its `bounds` or `bits`, and with bounds the (modulus, residue) of columns to `skip`."""
    blocks, n_segments, _ = segments.shape
    lengths = segments[..., 2].sum(1)
    if not n_segments or not bool((lengths > 0).any()):
        return {"where": torch.zeros_like(lengths)}
    chosen, member = _representatives(_signature(view, spans, stretches, partial), blocks, segments.device)
    mixed = bool((full.any(-1) & partial.any(-1)).any())  # a range of partial columns may hold full ones
    ranges = not mixed and all(span.modulus == 1 for span in spans.values())
    pieces = []
    order = lengths[chosen].sort(descending=True, stable=True).indices
    sizes = [n for n in lengths[chosen][order].tolist() if n]  # of those with something to describe
    for first, end in alike(sizes, view.rows.shape[1], pairs=_PAIRS_AT_ONCE, share=0.5):
        part = order[first:end]
        mine = chosen[part]
        exact = seen_by.spans_at(view, mine)
        columns, at, width = _places(view, exact, segments[mine], ranges)
        unwanted = width == 0
        if mixed:
            unwanted = unwanted | _listed_as_full(stretches, full, mine, columns)
        seen = _exact(view, exact, columns) & ~unwanted[:, None]
        if view.indices is not None or view.n_rows % view.rows.shape[1]:
            seen = seen & view.valid[mine % view.rows.shape[0]][..., None]
        pieces.append(_Piece(part, columns, at.int(), width.int(), seen))
    return _encode(pieces, lengths[chosen], member, stretches.residues)


def _places(view: View, spans: Spans, segments: Tensor, ranges: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Columns (R, X) of the lists, their places and widths: one by one or, in ranges, where an answer may change."""
    starts, counts = segments[..., 0], segments[..., 2]
    ends = counts.cumsum(1)
    total = ends[:, -1:]
    longest = int(total.max())
    cuts = [x for span in spans.values() for x in (span.start, span.stop) if isinstance(x, Tensor)]
    fixed = [x for span in spans.values() for x in (span.start, span.stop) if not isinstance(x, Tensor)]
    if not ranges or longest <= sum(cut.shape[1] for cut in cuts) + len(fixed) + ends.shape[1] + 1:
        place = torch.arange(longest, device=segments.device).expand(len(segments), -1)
        listed = torch.cat([segments[..., :2], ends[..., None]], -1)
        return expand(listed, longest, None), place, (place < total).long()
    cuts += [torch.full_like(total, x) for x in fixed]
    at = torch.cat(cuts, 1).clamp(view.first, view.stop)  # a column where something changes …
    places = (at[..., None] - starts[:, None]).clamp(min=0).minimum(counts[:, None]).sum(-1)  # … in the list
    places = torch.cat([torch.zeros_like(total), places, ends], 1).sort(1).values
    begin, width = places[:, :-1], places.diff(dim=1)
    segment = (begin[..., None] >= ends[:, None]).sum(-1).clamp(max=ends.shape[1] - 1)
    columns = begin + (starts - (ends - counts)).gather(1, segment)
    return columns, begin, width


def _signature(view: View, spans: Spans, stretches: Stretches, partial: Tensor) -> Tensor | None:
    """Numbers (B, n) that are equal only for blocks whose partial columns look the same, seen from their first row.

    None where the expression has too many leaves to say so: then every block is described by itself."""
    if len(spans) > 30:
        return None
    anchor = view.ends[:, :1].repeat(view.batch, 1)  # (B, 1)
    residues = stretches.residues
    shift = residues.shift[:, None] if isinstance(residues.shift, Tensor) else residues.shift
    phases = [view.valid.sum(1, keepdim=True).repeat(view.batch, 1), (anchor - shift) % residues.modulus]
    if view.indices is not None:
        spread = view.filled - view.filled[:, :1]  # (N, M)
        if bool((spread != spread[:1]).any()):
            phases.append(spread.repeat(view.batch, 1))
    for (leaf, swapped), span in spans.items():
        if isinstance(leaf, Blocks):
            phases.append(anchor % leaf.size)
        elif isinstance(leaf, Every) and not swapped:
            phases.append(anchor % leaf.step)
        elif not leaf.by_distance:
            phases.append(_alone(span, len(anchor), anchor.device))
    low, high = stretches.edges[:, :-1], stretches.edges[:, 1:]
    some = partial.any(-1) & (high > low)
    code = (partial << torch.arange(partial.shape[-1], device=partial.device)).sum(-1)
    columns = [torch.where(some, value, 0) for value in (low - anchor, high - anchor, stretches.flags, code)]
    return torch.cat([*phases, *columns], 1)


def _alone(span: Keys, blocks: int, device: torch.device) -> Tensor:
    """(B, 1) a number of its own for a block whose rows differ; −1 where all see one interval, which the edges say."""
    differ = torch.zeros(blocks, 1, dtype=torch.bool, device=device)
    for value in (span.start, span.stop):
        if isinstance(value, Tensor):
            differ = differ | (value != value[:, :1]).any(1, keepdim=True)
    return torch.where(differ, torch.arange(blocks, device=device)[:, None], -1)


def _representatives(signature: Tensor | None, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks that stand for all that look like them, (R,), and for every block which of these is its own, (B,)."""
    if signature is None:
        return torch.arange(blocks, device=device), torch.arange(blocks, device=device)
    rows = signature.cpu().contiguous()
    data, width = rows.numpy().tobytes(), rows.shape[1] * rows.element_size()
    keys = [data[at : at + width] for at in range(0, blocks * width, width)]
    first: dict[bytes, int] = {}
    for number, key in enumerate(keys):
        first.setdefault(key, number)
    place = {key: i for i, key in enumerate(first)}
    member = [place[key] for key in keys]
    return torch.tensor(list(first.values()), device=device), torch.tensor(member, device=device)


def _exact(view: View, spans: Spans, columns: Tensor) -> Tensor:
    """(R, M, X) whether a row sees a column, by the definition."""

    def leaf(atom: Atom) -> Tensor:
        return seen_by.sees(spans[atom], columns)

    seen = fold(view.mask, leaf=leaf, both=and_, either=or_, inverse=invert, swapped=view.by_key)
    return seen.broadcast_to((columns.shape[0], view.rows.shape[1], columns.shape[1]))


def _listed_as_full(stretches: Stretches, full: Tensor, blocks: Tensor, columns: Tensor) -> Tensor:
    """Which of the columns (R, L) are in the full part of their block already."""
    edges = stretches.edges[blocks]
    stretch = (torch.searchsorted(edges, columns.contiguous(), right=True) - 1).clamp(0, full.shape[1] - 1)
    residues = stretches.residues
    shift = residues.shift[blocks][:, None] if isinstance(residues.shift, Tensor) else residues.shift
    kind = residues.of[(columns - shift) % residues.modulus]
    return full[blocks[:, None], stretch, kind]


def _encode(pieces: list[_Piece], lengths: Tensor, member: Tensor, residues: Residues) -> dict[str, Any]:
    """Bounds if every row's columns are an interval of its list (but for skipped columns), else bits."""
    M = pieces[0].seen.shape[1]
    skip = _skipped(pieces, residues)
    table = torch.zeros(len(lengths), M, 2, dtype=torch.int32, device=lengths.device)
    for piece in pieces:
        found = _intervals(piece, skip)
        if found is None:
            break
        table[piece.chosen] = found
    else:
        return {"where": member * M, "bounds": table.reshape(-1, 2), "skip": skip}
    order = torch.cat([*(piece.chosen for piece in pieces), (lengths == 0).nonzero().flatten()])
    answers = []  # (places, M) what the rows see of every place of the lists, one list after the other
    for piece in pieces:
        there = piece.width > 0
        answers.append(piece.seen.transpose(1, 2)[there].repeat_interleave(piece.width[there], dim=0))
    bits, begins = pack(torch.cat(answers), lengths[order])
    where = torch.zeros_like(lengths)
    where[order] = begins
    return {"where": where[member], "bits": bits}


def _skipped(pieces: list[_Piece], residues: Residues) -> tuple[int, int]:
    """The one remainder whose columns nobody sees, if that explains every unseen column but those at the ends."""
    if residues.modulus == 1 or isinstance(residues.shift, Tensor):
        return 0, 0
    alone = (residues.sizes[residues.of[:64]] == 1).nonzero().flatten().tolist()
    unseen = [~piece.seen.any(1) for piece in pieces] if alone else []
    for remainder in alone:
        mine = [(piece.columns % residues.modulus == remainder) & (piece.width > 0) for piece in pieces]
        dead = [here & nobody for here, nobody in zip(mine, unseen, strict=True)]
        if any(here.any() for here in mine) and all(map(torch.equal, mine, dead)):
            return residues.modulus, remainder
    return 0, 0


def _intervals(piece: _Piece, skip: tuple[int, int]) -> Tensor | None:
    """(R, M, 2) int32 where each row's columns begin and end in the list without what is skipped; None: with holes."""
    seen, at, width = piece.seen, piece.at[:, None], piece.width[:, None]
    L = int((at + width).max())
    high = (seen * (at + width)).amax(2)  # 0: sees nothing
    low = torch.where(high > 0, L - (seen * (L - at)).amax(2), 0)
    if skip[0]:  # then every place is a run of its own
        counted = (piece.columns % skip[0] != skip[1]).cumsum(1)
        before = torch.nn.functional.pad(counted, (1, 0)).int()  # (R, L + 1)
        low, high = (before.gather(1, place.long()) for place in (low, high))
    if bool(((seen * width).sum(2, dtype=torch.int32) != high - low).any()):
        return None
    return torch.stack([low, high], -1)


# -- what has no structure ---------------------------------------------------------------------------------------------


def _tested(view: View) -> Lists:
    """Tests every pair, a few blocks at a time, and keeps the columns that some row sees."""
    M = view.rows.shape[1]
    S = view.stop - view.first
    at_once = max(1, _PAIRS_AT_ONCE // max(1, M * S * view.batch))
    counts: list[Tensor] = []
    columns: list[list[Tensor]] = [[] for _ in range(view.batch)]  # of each batch element's blocks, full, then partial
    chosen: list[list[Tensor]] = [[] for _ in range(view.batch)]  # the rows' answers at the partial ones, (columns, M)
    for rows, valid in zip(view.filled.split(at_once), view.valid[..., None].split(at_once), strict=True):
        seen = _test_blocks(view, rows) & valid  # (batch, n, M, S)
        everyone = (seen | ~valid).all(2) & seen.any(2)
        someone = seen.any(2) & ~everyone
        counts.append(torch.stack([everyone.sum(-1), someone.sum(-1)]))  # (2, batch, n)
        for b in range(view.batch):
            columns[b].append(torch.stack([everyone[b], someone[b]], 1).nonzero()[:, 2].to(torch.int32))
            chosen[b].append(seen[b].transpose(1, 2)[someone[b]])
    n_full, n_partial = torch.cat(counts, 2).flatten(1)  # (batch · N,) each
    total = n_full + n_partial
    begins = total.cumsum(0) - total
    answers = torch.cat([*chain.from_iterable(chosen)])
    bounds, bits = _ragged_intervals(answers, n_partial), None
    where = torch.arange(len(total), device=total.device) * M
    if bounds is None:
        bits, where = pack(answers, n_partial)
    segments = torch.stack([begins, torch.ones_like(begins), total], 1)[:, None]
    pool = torch.cat([*chain.from_iterable(columns)])
    return Lists.of(view, n_full, n_partial, segments, where=where, bounds=bounds, bits=bits, pool=pool)


def _test_blocks(view: View, rows: Tensor) -> Tensor:
    """(batch, n, M, S) for rows (n, M)."""
    flat = rows.reshape(-1, 1)
    at = torch.arange(view.first, view.stop, device=rows.device)[None]
    p, j = (at, flat) if view.by_key else (flat, at)
    seen = view.mask.test(p, j, view.grid)
    seen = seen.broadcast_to((*view.mask.batch_shape, flat.shape[0], at.shape[1]))
    return seen.reshape(view.batch, *rows.shape, at.shape[1])


def _ragged_intervals(answers: Tensor, lengths: Tensor) -> Tensor | None:
    """(blocks · M, 2) the interval each row sees of its block's partial columns, or None if some row's has holes."""
    of, place = ragged(lengths)
    inner = torch.nn.functional.pad(answers[1:] & answers[:-1] & (place[1:] > 0)[:, None], (0, 0, 1, 1))
    bounds = torch.zeros(len(lengths), answers.shape[1], 2, dtype=torch.int32, device=answers.device)
    # Where a row begins to see columns, and where it ends.
    for side, joined in enumerate((inner[:-1], inner[1:])):
        at, row = (answers & ~joined).nonzero(as_tuple=True)
        bounds[of[at], row, side] = place[at].int() + side
    is_whole = len(at) == int((bounds[..., 1] > 0).sum())  # each row that sees something does so once
    return bounds.reshape(-1, 2) if is_whole else None
