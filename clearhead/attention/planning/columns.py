"""Which columns all rows of a block see (full), and which some of them may (partial), from structure alone.

Between the places where a span begins or ends for the first or last row of a block, nothing changes but the residue of
the column. So a block has a handful of stretches, and in each stretch the expression is worked out once for each class
of residues, with a lower bound (seen by all rows) and an upper bound (seen by any): & | ~ act on such pairs exactly as
they do on masks. The bounds may be loose; what is called full is full, and what is called empty is empty."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.attention.planning.spans import Spans, View
from clearhead.masks import Atom, fold
from clearhead.masks.geometry import Keys

MAX_MODULUS = 1 << 20
"""Residues are tabulated up to this common modulus; beyond it a residue class counts as unknown."""
MAX_CLASSES = 16
"""How many kinds of residues are told apart."""
MAX_PROGRESSIONS = 4
"""Full columns that need more progressions than this in one stretch are treated as partial."""


@dataclass(frozen=True)
class Residues:
    """Columns sorted into classes by their remainder: those that every residue span treats alike.

    `of` maps a remainder to its class. `shift` (blocks,) is added by each block: column − shift is what is divided."""

    modulus: int
    of: Tensor  # (modulus,)
    count: int
    shift: Tensor | int
    truth: dict[Atom, Tensor]  # (count,) bool for spans that are known by class

    def members(self, kind: int) -> Tensor:
        return (self.of == kind).nonzero().flatten()


@dataclass(frozen=True)
class Stretches:
    """Edges (B, E + 1) of the stretches of each block and, for each, class by class, what is full and what is seen."""

    edges: Tensor
    full: Tensor  # (B, E, C) bool
    seen: Tensor  # (B, E, C) bool
    flags: Tensor  # (B, E) what each span is there (none, some, all), as one number
    residues: Residues


def residues_of(spans: Spans, device: torch.device) -> Residues:
    """The classes of columns: from residues that never change, or from one that changes block by block."""
    moving = {atom: span for atom, span in spans.items() if span.modulus > 1 and isinstance(span.residue, Tensor)}
    fixed = {atom: span for atom, span in spans.items() if span.modulus > 1 and atom not in moving}
    shift = _common_shift(list(moving.values()))
    if shift is not None:
        modulus = next(iter(moving.values())).modulus
        of = torch.ones(modulus, dtype=torch.int64, device=device)
        of[0] = 0
        truth = torch.tensor([True, False][: min(modulus, 2)], device=device)
        return Residues(modulus, of, len(truth), shift, dict.fromkeys(moving, truth))
    modulus = 1
    known: list[Atom] = []
    for atom, span in fixed.items():
        common = math.lcm(modulus, span.modulus)
        if common <= MAX_MODULUS and len(known) < 16:
            modulus = common
            known.append(atom)
    remainder = torch.arange(modulus, device=device)
    code = torch.zeros(modulus, dtype=torch.int64, device=device)
    tables = {atom: (remainder - fixed[atom].residue) % fixed[atom].modulus == 0 for atom in known}
    for bit, table in enumerate(tables.values()):
        code += table.long() << bit
    kinds, of = code.unique(return_inverse=True)
    if len(kinds) > MAX_CLASSES:
        return Residues(1, torch.zeros(1, dtype=torch.int64, device=device), 1, 0, {})
    truth_of = {atom: (kinds >> bit) & 1 == 1 for bit, atom in enumerate(tables)}
    return Residues(modulus, of, len(kinds), 0, truth_of)


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
    residues = residues_of(spans, device)
    bounds = {atom: _bounds(span, blocks, device) for atom, span in spans.items()}
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


def _bounds(span: Keys, blocks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Least and greatest start, least and greatest stop of the rows of each block, (B,) each."""

    def extremes(value: Tensor | int) -> tuple[Tensor, Tensor]:
        if isinstance(value, Tensor):
            return value.amin(1), value.amax(1)
        same = torch.full((blocks,), value, device=device)
        return same, same

    return *extremes(span.start), *extremes(span.stop)
