"""What the rows of a block see of its partial columns: an interval of the list for each row, at worst a bit a pair.

Blocks that look alike, seen from their first row, are described once."""

from __future__ import annotations

from operator import and_, invert, or_
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.attention.planning.columns import Residues, Stretches
from clearhead.attention.planning.lists import alike, expand, pack
from clearhead.attention.planning.spans import Spans, View, sees, spans_at
from clearhead.masks import Atom, Blocks, Causal, Every, Full, Stride, Window, fold
from clearhead.masks.geometry import Keys

_PAIRS_AT_ONCE = 1 << 24
# Leaves whose answer depends on p − j alone.
_MOVE_ALONG = (Full, Causal, Window, Stride)


class Marks(NamedTuple):
    """Where each block's description begins, the descriptions (bounds or bits, or neither), and what is left out.

    Bounds count the places that are left when columns ≡ residue are taken out, `skip` being (modulus, residue)."""

    where: Tensor  # (B,)
    bounds: Tensor | None
    bits: Tensor | None
    skip: tuple[int, int] = (0, 0)


class _Piece(NamedTuple):
    """Some representatives with lists of about the same length, place by place or in runs that all rows treat alike."""

    chosen: Tensor  # (R,) which of the representatives
    columns: Tensor  # (R, X) the first column of a run
    at: Tensor  # (R, X) int32: its place in the list
    width: Tensor  # (R, X) int32: how many places the run has; 0 beyond the list
    seen: Tensor  # (R, M, X)


def describe(view: View, spans: Spans, stretches: Stretches, full: Tensor, partial: Tensor, segments: Tensor) -> Marks:
    """The marks of all blocks, from their partial segments (B, n, 3) of start, step, count."""
    blocks, n_segments, _ = segments.shape
    lengths = segments[..., 2].sum(1)
    if not n_segments or not bool((lengths > 0).any()):
        return Marks(torch.zeros_like(lengths), None, None)
    chosen, member = _representatives(_signature(view, spans, stretches, partial), blocks, segments.device)
    mixed = bool((full.any(-1) & partial.any(-1)).any())  # a range of partial columns may hold full ones
    ranges = not mixed and all(span.modulus == 1 for span in spans.values())
    pieces = []
    for part in _parts(lengths[chosen], view.rows.shape[1]):
        mine = chosen[part]
        exact = spans_at(view, mine)
        columns, at, width = _runs(view, exact, segments[mine], ranges)
        unwanted = width == 0
        if mixed:
            unwanted = unwanted | _listed_as_full(stretches, full, mine, columns)
        seen = _exact(view, exact, columns) & ~unwanted[:, None]
        if not view.consecutive or view.n_rows % view.rows.shape[1]:
            seen = seen & view.valid[mine % view.rows.shape[0]][..., None]
        pieces.append(_Piece(part, columns, at.int(), width.int(), seen))
    return _encode(pieces, lengths[chosen], member, stretches.residues)


def _runs(view: View, spans: Spans, segments: Tensor, ranges: bool) -> tuple[Tensor, Tensor, Tensor]:
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
    if not view.consecutive:
        spread = view.filled - view.filled[:, :1]  # (N, M)
        if bool((spread != spread[:1]).any()):
            phases.append(spread.repeat(view.batch, 1))
    for (leaf, swapped), span in spans.items():
        if isinstance(leaf, Blocks):
            phases.append(anchor % leaf.size)
        elif isinstance(leaf, Every) and not swapped:
            phases.append(anchor % leaf.stride)
        elif not isinstance(leaf, _MOVE_ALONG):
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
        every = torch.arange(blocks, device=device)
        return every, every
    rows = signature.cpu().contiguous()
    data, width = rows.numpy().tobytes(), rows.shape[1] * rows.element_size()
    keys = [data[at : at + width] for at in range(0, blocks * width, width)]
    first: dict[bytes, int] = {}
    for number, key in enumerate(keys):
        first.setdefault(key, number)
    place = {key: i for i, key in enumerate(first)}
    member = [place[key] for key in keys]
    return torch.tensor(list(first.values()), device=device), torch.tensor(member, device=device)


def _parts(lengths: Tensor, M: int) -> list[Tensor]:
    """The representatives with something to describe, in parts of about the same length and bounded size."""
    order = lengths.sort(descending=True, stable=True).indices
    sizes = [n for n in lengths[order].tolist() if n]
    return [order[at:end] for at, end in alike(sizes, M, pairs=_PAIRS_AT_ONCE, share=0.5)]


def _exact(view: View, spans: Spans, columns: Tensor) -> Tensor:
    """(R, M, X) whether a row sees a column, by the definition."""

    def leaf(atom: Atom) -> Tensor:
        return sees(spans[atom], columns)

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


def _encode(pieces: list[_Piece], lengths: Tensor, member: Tensor, residues: Residues) -> Marks:
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
        return Marks(member * M, table.reshape(-1, 2), None, skip)
    order = torch.cat([*(piece.chosen for piece in pieces), (lengths == 0).nonzero().flatten()])
    answers = []  # (places, M) what the rows see of every place of the lists, one list after the other
    for piece in pieces:
        there = piece.width > 0
        answers.append(piece.seen.transpose(1, 2)[there].repeat_interleave(piece.width[there], dim=0))
    bits, begins = pack(torch.cat(answers), lengths[order])
    where = torch.zeros_like(lengths)
    where[order] = begins
    return Marks(where[member], None, bits)


def _skipped(pieces: list[_Piece], residues: Residues) -> tuple[int, int]:
    """The one remainder whose columns nobody sees, if that explains every unseen column but those at the ends."""
    if residues.modulus == 1 or isinstance(residues.shift, Tensor):
        return 0, 0
    alone = torch.bincount(residues.of, minlength=residues.count)[residues.of[:64]] == 1
    candidates = alone.nonzero().flatten().tolist()
    if not candidates:
        return 0, 0
    seen = [(piece.columns % residues.modulus, piece.width > 0, piece.seen.any(1)) for piece in pieces]
    for remainder in candidates:
        hits = dead = 0
        for remainders, inside, anyone in seen:
            mine = (remainders == remainder) & inside
            hits += int(mine.sum())
            dead += int((mine & ~anyone).sum())
        if hits and hits == dead:
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
