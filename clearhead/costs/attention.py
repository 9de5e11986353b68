"""The operations of multi-head attention: four projections, and between them one fused kernel or the equation step by
step.

A fused kernel keeps q, k, v, its output and one number a query (the log of the softmax's sum), and computes the
weights again on the way back. The equation keeps the (T, S) weights of every head. torch falls back to unfused
steps of its own on a CPU when attention weights are dropped.

    B batch   T queries   S keys   H heads   K key/value heads   D head width   M model width   P pairs of query and key
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from clearhead.attention.kernels.gathered import blocking_on, saves
from clearhead.attention.plan import Blocking, Plan, plan
from clearhead.attention.planning.cost import WORTH_PLANNING, rates_of
from clearhead.costs.amounts import ZERO, Amount, exact_ratio
from clearhead.costs.layers import Setting, Shape, dropout, elementwise, linear
from clearhead.costs.program import Ceiling, Kernel, Look, Made, Op
from clearhead.masks import Causal, Full, Mask
from clearhead.positions import Rotary

__all__ = ["Heads", "Pairs", "Sight", "attention", "pairs_of"]

_WIDE = 4


@dataclass(frozen=True)
class Heads:
    """The sizes of one attention layer. H·D is M unless a head's width was chosen freely."""

    M: Amount
    H: Amount
    K: Amount
    D: Amount
    bias: bool = True
    dropout: float = 0.0
    rotary: Rotary | None = None

    @property
    def queries(self) -> Amount:
        return self.H * self.D

    @property
    def keys(self) -> Amount:
        return self.K * self.D


@dataclass(frozen=True)
class Pairs:
    """Pairs of a query and a key, over the batch, for one head: all there are, those allowed, those this way
    computes.
    """

    dense: Amount
    allowed: Amount
    computed: Amount
    mask: Mask | None = None
    sequences: int = 1  # how often the mask's own pairs count: the batch, unless the mask has one
    lengths: tuple[int, int] = (0, 0)
    blocking: Blocking = Blocking()
    gathers: bool = False  # the plan is what runs

    @cached_property
    def planned(self) -> int:
        """What the mask's plan computes: the pairs allowed, and those beside them in a tile."""
        return self.dense.value if self.mask is None else self.sequences * self.plan.computed

    @cached_property
    def plan(self) -> Plan:
        """The plan of this mask, cut as the device's kernels want it."""
        assert self.mask is not None
        T, S = self.lengths
        return plan(self.mask, T, S, offset=_offset(self.mask, T, S), blocking=self.blocking)


@dataclass(frozen=True)
class Sight:
    """Who sees whom: the lengths, the mask, and whether a bias (H, T, S) is added (and learned)."""

    T: Amount
    S: Amount
    pairs: Pairs
    dense_mask: bool = False  # the mask is given to the kernel as a (T, S) tensor
    bias: bool = False
    learned_bias: bool = False
    writes: bool = False  # in a decoder, whose keys and values a cache keeps


def pairs_of(s: Setting, mask: Mask | None, heads: Heads, T: Amount, S: Amount, *, letter: str = "P") -> Pairs:
    """Counted without building (T, S). `letter` stands for a count that has no formula in the sizes."""
    dense = s.B * (T * S)
    if mask is None or isinstance(mask, Full):
        return Pairs(dense, dense, dense)
    sequences = s.B.value if math.prod(mask.batch_shape) == 1 else 1
    about: dict[str, Any] = {
        "mask": mask,
        "sequences": sequences,
        "lengths": (T.value, S.value),
        "blocking": blocking_on(torch.device(s.device), s.dtype, heads.D.value, heads.D.value),
    }
    if isinstance(mask, Causal) and T.value == S.value:
        # T(T + 1)/2: the kernel's own causal flag skips what lies above the diagonal.
        allowed = s.B * exact_ratio(T * (T + 1), Amount(2))
        return Pairs(dense, allowed, dense if s.impl == "reference" else allowed, **about)
    counted = s.letter(letter, mask.count(T.value, S.value, offset=_offset(mask, T.value, S.value)))
    found = Pairs(dense, s.B * counted if sequences > 1 or s.B.value == 1 else counted, dense, **about)
    if not _gathers(s, found, heads):
        return found
    planned = s.letter(f"{letter}_g", found.planned // sequences)
    computed = s.B * planned if sequences > 1 or s.B.value == 1 else planned
    return replace(found, computed=computed, gathers=True)


def _gathers(s: Setting, pairs: Pairs, heads: Heads) -> bool:
    """Whether the plan runs: asked for by name, or, as `attend` chooses, where it promises to be faster."""
    T, S = pairs.lengths
    if s.impl in ("reference", "fused") or pairs.mask is None or (s.training and heads.dropout):
        return False
    if s.impl == "gathered":
        return True
    if T * S < WORTH_PLANNING:
        return False
    rates = rates_of(torch.device(s.device), s.dtype)
    return saves(pairs.plan, s.B.value * heads.H.value, heads.D.value, s.training, rates)


def _offset(mask: Mask, T: int, S: int) -> int | None:
    """Queries that are fewer than the keys stand at their end."""
    return None if T == S or not mask.uses_query_position else max(S - T, 0)


def attention(s: Setting, name: str, part: str, x: str, heads: Heads, sight: Sight, memory: str | None = None) -> str:
    """The ops of `MultiHeadAttention`; returns the name of its result."""
    p = s.program
    source = x if memory is None else memory
    rows, source_rows = s.B * sight.T, s.B * sight.S
    to = f"{part}projections"
    p.looks.append(
        Look(
            p.here.times,
            heads.H * sight.pairs.dense,
            s.B * heads.H * sight.T,
            source_rows * heads.keys * 2,
            writes=sight.writes,
        )
    )
    linear(s, f"{name}.q_proj", to, x, "q", Shape(rows, heads.M, heads.queries), bias=heads.bias)
    q = _rotated(s, to, "q", heads, sight.T, heads.H)
    linear(s, f"{name}.k_proj", to, source, "k", Shape(source_rows, heads.M, heads.keys), bias=heads.bias)
    linear(s, f"{name}.v_proj", to, source, "v", Shape(source_rows, heads.M, heads.keys), bias=heads.bias)
    k = _rotated(s, to, "k", heads, sight.S, heads.K)
    if s.impl == "reference":
        out = _equation(s, f"{part}scores", q, k, heads, sight)
    elif _falls_back(s, heads, sight):
        out = _unfused(s, f"{part}scores", q, k, heads, sight)
    else:
        out = _fused(s, f"{part}scores", q, k, heads, sight)
    linear(s, f"{name}.o_proj", to, out, "attended", Shape(rows, heads.queries, heads.M), bias=heads.bias)
    p.drop("q", "k", "v", "q turned", "k turned", "out", "out copied")
    return "attended"


def _falls_back(s: Setting, heads: Heads, sight: Sight) -> bool:
    """Whether torch has no fused kernel for this call: on a CPU with dropped weights or a learned bias, on a GPU in
    float64, and in float32 where query heads share key heads.
    """
    if sight.pairs.gathers:
        return False
    if s.device == "cuda":
        return s.itemsize == 8 or (s.itemsize == 4 and heads.K is not heads.H)
    return bool((s.training and heads.dropout) or sight.learned_bias)


def _rotated(s: Setting, part: str, x: str, heads: Heads, length: Amount, n: Amount) -> str:
    """Rotary positions turn in float32; the cosines and sines are kept, the vectors are not."""
    if heads.rotary is None:
        return x
    elements = s.B * length * n * heads.D
    half = heads.rotary.turned_width(heads.D.value) // 2
    waves = tuple(Made(wave, length * (half * _WIDE)) for wave in ("cosines", "sines"))
    y = f"{x} turned"
    elementwise(s, f"rotate {x}", part, (x,), s.tensor(y, elements), notes=waves, scratch=elements * _WIDE)
    s.program.drop(x)
    return y


# ---------------------------------------------------------------------- one kernel


def _fused(s: Setting, part: str, q: str, k: str, heads: Heads, sight: Sight) -> str:
    p = s.program
    rows = s.B * sight.T
    out = s.tensor("out", rows * heads.queries)
    takes = (q, k, "v")
    notes = [Made("log-sums", s.B * heads.H * sight.T * _WIDE)]
    pairs = sight.pairs.computed
    product = 2 * (heads.queries * pairs)
    moved = out.n_bytes * 2 + s.B * sight.S * heads.keys * (2 * s.itemsize)
    gathers = sight.pairs.gathers
    if (sight.dense_mask and not gathers) or sight.bias:
        width = heads.H if sight.bias else Amount(1)
        notes.append(s.tensor("mask", width * sight.T * sight.S))
        moved = moved + notes[-1].n_bytes
        if sight.bias and sight.dense_mask and not gathers:
            notes.append(Made("hidden pairs", sight.T * sight.S))
    accumulators = rows * heads.queries * _WIDE if s.itemsize < _WIDE else ZERO
    p.add(
        Op(
            "attend",
            part,
            takes,
            (out,),
            forward=(Kernel(moved, 2 * product, ceiling=Ceiling.ATTENTION),),
            # Five products: the scores once more, and the gradients of weights, values, queries and keys. A plan goes
            # by queries and by keys, one after the other, and makes scores and weights' gradients twice.
            backward=(
                Kernel(out.n_bytes * 2),
                Kernel(
                    moved * 2 + accumulators,
                    (7 if gathers else 5) * product,
                    ceiling=Ceiling.ATTENTION_BACKWARD,
                ),
            ),
            keeps=(*takes, "out"),
            notes=tuple(notes),
            scratch=sight.T * sight.S if sight.dense_mask and not gathers and s.device == "cuda" else ZERO,
            backward_scratch=accumulators if s.device == "cuda" else ZERO,
            elements=heads.H * pairs,
        )
    )
    if heads.rotary is None and not gathers:
        return "out"
    # Turned queries lie head by head, and so does their output, and a plan's: joining the heads is a copy.
    elementwise(s, "join heads", part, ("out",), s.tensor("out copied", rows * heads.queries))
    return "out copied"


# ---------------------------------------------------------------------- the equation


def _equation(s: Setting, part: str, q: str, k: str, heads: Heads, sight: Sight) -> str:
    """softmax(QKᵀ/√D)V as `kernels/reference.py` computes it: everything between q, k, v and the output in float32."""
    p = s.program
    keys = s.B * sight.S * heads.queries
    weights = _scores(s, part, q, k, heads, sight)
    cells = heads.H * sight.pairs.dense
    weights = dropout(s, part, weights, "weights dropped", cells, heads.dropout, _WIDE)
    _product(s, part, (weights, "v"), keys, heads, sight, max(s.itemsize, _WIDE))
    p.drop("weights", "weights allowed", "weights dropped")
    elementwise(s, "join heads", part, ("summed",), s.tensor("out", s.B * sight.T * heads.queries))
    p.drop("summed")
    return "out"


def _scores(s: Setting, part: str, q: str, k: str, heads: Heads, sight: Sight) -> str:
    """From queries and keys to weights: scale, compare, hide, softmax."""
    p = s.program
    queries, keys = s.B * sight.T * heads.queries, s.B * sight.S * heads.queries
    cells = heads.H * sight.pairs.dense
    scores = Made("scores", cells * _WIDE)
    elementwise(s, "scale", part, (q,), Made("q scaled", queries * _WIDE))
    copies = (Made("q copied", queries * _WIDE), Made("k copied", keys * _WIDE))
    p.add(
        Op(
            "scores",
            part,
            ("q scaled", k),
            (scores,),
            forward=(
                Kernel((queries + keys) * (2 * _WIDE)),
                Kernel((queries + keys + cells) * _WIDE, 2 * (cells * heads.D)),
            ),
            backward=(Kernel((queries + keys + cells) * _WIDE, 2 * (cells * heads.D)),) * 2,
            notes=copies,
        )
    )
    p.drop("q scaled")
    last = "scores"
    if sight.bias:
        elementwise(s, "add bias", part, (last,), Made("scores biased", cells * _WIDE), passes=(last,))
        p.drop(last)
        last = "scores biased"
    hides = sight.pairs.allowed is not sight.pairs.dense
    hidden = (Made("hidden pairs", sight.T * sight.S),)
    if hides:
        elementwise(s, "hide", part, (last,), Made("scores allowed", cells * _WIDE), notes=hidden)
        p.drop(last)
        last = "scores allowed"
    weights = Made("weights", cells * _WIDE)
    elementwise(s, "softmax", part, (last,), weights, keeps=("weights",), elements=cells)
    p.drop(last)
    if not hides:
        return "weights"
    elementwise(s, "zero", part, ("weights",), Made("weights allowed", cells * _WIDE), notes=hidden)
    return "weights allowed"


def _unfused(s: Setting, part: str, q: str, k: str, heads: Heads, sight: Sight) -> str:
    """What torch does on a CPU where its fused kernel cannot: queries and keys both scaled, weights kept
    and dropped."""
    queries, keys = s.B * sight.T * heads.queries, s.B * sight.S * heads.queries
    cells = heads.H * sight.pairs.dense
    w = s.itemsize
    notes = [s.tensor("q copied", queries), s.tensor("k copied", keys)]
    if sight.learned_bias and sight.pairs.allowed is not sight.pairs.dense:
        notes.append(Made("hidden pairs", sight.T * sight.S))
    s.program.add(
        Op(
            "scores",
            part,
            (q, k),
            (s.tensor("scores", cells),),
            forward=(
                Kernel((queries + keys) * (2 * w)),
                Kernel((queries + keys + cells) * w, 2 * (cells * heads.D)),
            ),
            backward=(Kernel((queries + keys + cells) * w, 2 * (cells * heads.D)),) * 2,
            notes=tuple(notes),
        )
    )
    elementwise(s, "softmax", part, ("scores",), s.tensor("weights", cells), keeps=("weights",), elements=cells)
    s.program.drop("scores")
    last = dropout(s, part, "weights", "weights dropped", cells, heads.dropout)
    _product(s, part, (last, "v"), keys, heads, sight, s.itemsize)
    s.program.drop("weights", "weights dropped")
    elementwise(s, "join heads", part, ("summed",), s.tensor("out", queries))
    s.program.drop("summed")
    return "out"


def _product(s: Setting, part: str, takes: tuple[str, str], keys: Amount, heads: Heads, sight: Sight, w: int) -> None:
    """Weights times values, as a batched product over copies that lie head by head, in numbers of w bytes."""
    queries = s.B * sight.T * heads.queries
    cells = heads.H * sight.pairs.dense
    kernel = Kernel((queries + keys + cells) * w, 2 * (cells * heads.D))
    s.program.add(
        Op(
            "weighted sum",
            part,
            takes,
            (Made("summed", queries * w),),
            forward=(Kernel(keys * (2 * w)), kernel),
            backward=(kernel, kernel),
            keeps=takes[:1],
            notes=(Made("v copied", keys * w),),
        )
    )
