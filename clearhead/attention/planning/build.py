"""From a view of a mask to its `Lists`: by structure where every leaf has some, by testing pairs where one has not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.attention.planning.columns import MAX_PROGRESSIONS, Residues, Stretches, stretches_of
from clearhead.attention.planning.describe import describe
from clearhead.attention.planning.lists import Lists
from clearhead.attention.planning.spans import Spans, View, outline_of
from clearhead.attention.planning.tested import tested

_MAX_SEGMENTS = 12


def build(
    view: View, *, indices: Tensor | None = None, keep_empty: bool = True, device: torch.device | None = None
) -> Lists:
    """The lists of a view. `indices` (N, M) are the rows' indices if the blocks are not simply consecutive rows.

    What must be tested pair by pair is tested on `device`, if one is given; the lists are then there."""
    spans = outline_of(view)
    if spans is not None:
        found = _structured(view, spans, indices, keep_empty)
        if found is not None:
            return found
    if device is not None:
        view = replace(view, rows=view.rows.to(device))
        indices = None if indices is None else indices.to(device)
    return tested(view, indices, keep_empty)


def _structured(view: View, spans: Spans, indices: Tensor | None, keep_empty: bool) -> Lists | None:
    stretches = stretches_of(view, spans)
    residues = stretches.residues
    sizes = torch.bincount(residues.of, minlength=residues.count)  # members of each class
    every_class = stretches.full.all(-1)
    simple = every_class | ((stretches.full * sizes).sum(-1) <= MAX_PROGRESSIONS)
    full = stretches.full & simple[..., None]
    partial = stretches.seen & ~full
    full_segments = _segments(stretches, full, MAX_PROGRESSIONS, cover=False)
    partial_segments = _segments(stretches, partial, 1, cover=True)
    if full_segments.shape[1] + partial_segments.shape[1] > _MAX_SEGMENTS:
        return None
    marks = describe(view, spans, stretches, full, partial, partial_segments)
    modulus, residue = marks.skip
    for found in (full_segments, partial_segments):
        found[..., 0] -= view.first
    if modulus:
        residue = (residue - view.first) % modulus
        partial_segments = _thinned(partial_segments, modulus, residue)
    n_full, n_partial = (found[..., 2].sum(1) for found in (full_segments, partial_segments))
    segments = torch.cat([full_segments, partial_segments], 1)
    segments[..., 2] = segments[..., 2].cumsum(1)
    marks = marks._replace(skip=(modulus, residue))
    return Lists.of(view, indices, keep_empty, (n_full, n_partial), segments, **marks._asdict())


def _segments(stretches: Stretches, on: Tensor, most: int, *, cover: bool) -> Tensor:
    """Progressions (B, n, 3) of start, step, count for the classes that are `on` (B, E, C).

    Stretches with all classes are ranges; those of a few remainders (at most `most`) are progressions, one for each.
    What is left is covered by ranges too if `cover`, and is not there otherwise."""
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
