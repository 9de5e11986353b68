"""A mask seen from one side: for each row, what every part of the expression lets it see.

A *view* has rows (queries, or keys when the gradient of keys is wanted) gathered into blocks, and columns (the other
side). Each leaf of the expression gives every row a *span*: an interval of columns and a residue class. Everything is
in positions, not indices, and vectorised over rows.

Between the places where a span begins or ends for the first or last row of a block, nothing changes but the residue of
the column. So a block has a handful of *stretches*, and in each the expression is worked out once for each class of
residues, with a lower bound (seen by all rows: full) and an upper bound (seen by any): & | ~ act on such pairs exactly
as they do on masks. The bounds may be loose; what is called full is full, and what is called empty is empty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clearhead.masks import Atom, Blocks, Causal, Full, Mask, Window, fold, leaves
from clearhead.masks.regions import Grid, Keys, KeysOf

MAX_MODULUS = 1 << 20
"""Residues are tabulated up to this common modulus; beyond it a residue class counts as unknown."""
MAX_CLASSES = 16
"""How many kinds of residues are told apart."""
MAX_PROGRESSIONS = 4
"""Full columns that need more progressions than this in one stretch are treated as partial."""
# Leaves whose interval moves one way only as the position grows: the first and the last row of a block say all.
_MONOTONE = (Full, Causal, Window, Blocks)


@dataclass(frozen=True)
class View:
    """Rows in blocks, and the columns they may see.

    `rows` (N, M) are positions in increasing order, −1 where a block is not full. `by_key` says that rows are keys and
    columns are queries."""

    mask: Mask
    rows: Tensor
    first: int  # position of the first column
    stop: int  # position after the last column
    grid: Grid
    n_rows: int  # how many rows there are in all, in these blocks or not
    by_key: bool
    indices: Tensor | None  # (N, M) the rows' indices, −1 for none; None: the blocks are simply rows 0, 1, 2, …

    @cached_property
    def valid(self) -> Tensor:
        return self.rows >= 0

    @cached_property
    def filled(self) -> Tensor:
        """The rows with gaps filled by the block's first row, which then decides nothing."""
        return torch.where(self.valid, self.rows, self.rows[:, :1])

    @cached_property
    def ends(self) -> Tensor:
        """(N, 2) the first and the last row of each block."""
        return torch.stack([self.rows[:, 0], self.rows.amax(1)], 1)

    @cached_property
    def functions(self) -> dict[Atom, KeysOf | None]:
        """For every leaf the function from rows to the columns they see; None where it has no such form."""
        return {atom: atom.keys() for atom in leaves(self.mask, swapped=self.by_key)}

    @cached_property
    def batch(self) -> int:
        """How many patterns there are: one for each element of the mask's batch."""
        return math.prod(self.mask.batch_shape)


Spans = dict[Atom, Keys]
"""What each leaf lets rows see, in tensors (batch · N, m) for the m rows of a block that were asked about."""


def sees(span: Keys, columns: Tensor) -> Tensor:
    """Whether rows see a list of columns (R, L) for each block: (R, m, L), or smaller where it broadcasts."""
    at, row = columns.unsqueeze(1), span.each(lambda x: x.unsqueeze(-1))
    found = (at >= row.start) & (at < row.stop)
    return found if row.modulus == 1 else found & (at % row.modulus == row.residue % row.modulus)


def outline_of(view: View) -> Spans | None:
    """What each leaf says of each block, or None where some leaf has no such form (it must be tested pair by pair).

    Leaves that move one way only are asked about the ends of a block, the others about all of its rows."""
    if None in view.functions.values():
        return None
    ends, filled = view.ends, view.filled
    return {atom: _span(view, atom, ends if isinstance(atom.leaf, _MONOTONE) else filled) for atom in view.functions}


def spans_at(view: View, blocks: Tensor) -> Spans:
    """What each leaf says of every row of these blocks (R,), b · N + n for block n of batch element b."""
    if view.batch == 1:
        return {atom: _span(view, atom, view.filled[blocks]) for atom in view.functions}
    # With a batch the answers for one row of blocks are many: ask for all, and choose.
    return {atom: _span(view, atom, view.filled).each(lambda x: x[blocks]) for atom in view.functions}


def _span(view: View, atom: Atom, rows: Tensor) -> Keys:
    function, device = view.functions[atom], atom.leaf.device
    assert function is not None  # or there would be no outline

    def spread(x: Tensor) -> Tensor:
        return x.to(rows.device).broadcast_to(shape).reshape(view.batch * rows.shape[0], rows.shape[1])

    flat, shape = rows.reshape(-1), (*view.mask.batch_shape, rows.numel())
    return function(flat if device is None else flat.to(device)).each(spread)


@dataclass(frozen=True)
class Residues:
    """Columns sorted into classes by their remainder: those that every residue span treats alike.

    `of` maps a remainder to its class. `shift` (blocks,) is added by each block: column − shift is what is divided."""

    modulus: int
    of: Tensor  # (modulus,)
    count: int
    shift: Tensor | int
    truth: dict[Atom, Tensor]  # (count,) bool for spans that are known by class

    @cached_property
    def sizes(self) -> Tensor:
        """(count,) how many remainders each class has."""
        return torch.bincount(self.of, minlength=self.count)


@dataclass(frozen=True)
class Stretches:
    """Edges (B, E + 1) of the stretches of each block and, for each, class by class, what is full and what is seen."""

    edges: Tensor
    full: Tensor  # (B, E, C) bool
    seen: Tensor  # (B, E, C) bool
    flags: Tensor  # (B, E) what each span is there (none, some, all), as one number
    residues: Residues


def _residues(spans: Spans, device: torch.device) -> Residues:
    """The classes of columns: from residues that never change, or from one that changes block by block."""
    moving = {atom: span for atom, span in spans.items() if span.modulus > 1 and isinstance(span.residue, Tensor)}
    fixed = {atom: span for atom, span in spans.items() if span.modulus > 1 and atom not in moving}
    shift = _common_shift(list(moving.values()))
    if shift is not None:
        fixed = {atom: span._replace(residue=0) for atom, span in moving.items()}  # counted from the shift
    modulus = 1
    known: list[Atom] = []
    for atom, span in fixed.items():
        common = math.lcm(modulus, span.modulus)
        if common <= MAX_MODULUS and len(known) < 16:
            modulus = common
            known.append(atom)
    remainder = torch.arange(modulus, device=device)
    code = torch.zeros_like(remainder)
    for bit, atom in enumerate(known):
        code += ((remainder - fixed[atom].residue) % fixed[atom].modulus == 0).long() << bit
    kinds, of = code.unique(return_inverse=True)
    if len(kinds) > MAX_CLASSES:
        return Residues(1, torch.zeros(1, dtype=torch.int64, device=device), 1, 0, {})
    truth = {atom: (kinds >> bit) & 1 == 1 for bit, atom in enumerate(known)}
    return Residues(modulus, of, len(kinds), 0 if shift is None else shift, truth)


def _common_shift(moving: list[Keys]) -> Tensor | None:
    """The residue that all moving spans share within each block, or None."""
    if not moving or any(span.modulus != moving[0].modulus for span in moving):
        return None
    first = moving[0].residue
    assert isinstance(first, Tensor)
    if any(not torch.equal(span.residue, first) for span in moving[1:] if isinstance(span.residue, Tensor)):
        return None
    shift = first[:, 0]
    return shift if bool((first == shift[:, None]).all()) else None


def stretches_of(view: View, spans: Spans) -> Stretches:
    """Cut each block's columns where a span changes, and say what is full and what is seen in each stretch."""
    device = view.rows.device
    blocks = view.batch * view.rows.shape[0]
    residues = _residues(spans, device)

    def extremes(value: Tensor | int) -> tuple[Tensor, Tensor]:
        """The least and the greatest of the rows of each block, (B,) each."""
        if isinstance(value, Tensor):
            return value.amin(1), value.amax(1)
        same = torch.full((blocks,), value, device=device)
        return same, same

    bounds = {atom: (*extremes(span.start), *extremes(span.stop)) for atom, span in spans.items()}
    ends = [torch.full((blocks,), at, device=device) for at in (view.first, view.stop)]
    cuts = [cut.clamp(view.first, view.stop) for four in bounds.values() for cut in four]
    edges = torch.stack([*ends, *cuts], 1).sort(1).values  # (B, E + 1)
    at = edges[:, :-1]  # a stretch is all alike: ask at its first column
    flags = torch.zeros_like(at)

    def pair(atom: Atom) -> tuple[Tensor, Tensor]:
        low_min, low_max, high_min, high_max = (four[:, None] for four in bounds[atom])
        full = ((at >= low_max) & (at < high_min))[..., None]  # (B, E, 1)
        seen = ((at >= low_min) & (at < high_max))[..., None]
        if spans[atom].modulus > 1:
            truth = residues.truth.get(atom)
            full, seen = (full & False, seen) if truth is None else (full & truth, seen & truth)
        return full, seen

    for atom in spans:
        full, seen = pair(atom)
        flags = flags * 4 + full.any(-1) + 2 * seen.any(-1)
    full, seen = fold(
        view.mask,
        leaf=pair,
        both=lambda a, b: (a[0] & b[0], a[1] & b[1]),
        either=lambda a, b: (a[0] | b[0], a[1] | b[1]),
        inverse=lambda a: (~a[1], ~a[0]),
        swapped=view.by_key,
    )
    shape = (*at.shape, residues.count)
    return Stretches(edges, full.broadcast_to(shape), seen.broadcast_to(shape), flags, residues)
