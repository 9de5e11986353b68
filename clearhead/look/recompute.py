"""Weights for the heads and rows asked for, from what a call of attention was given: never T × T for a few rows.

The arithmetic is the reference's (`attention/kernels/reference.py`): scores, bias and softmax in float32 or wider, and
the mask asked for these rows only. The letters are the design's; h heads and r rows are those that were chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clearhead.attention import Gumbel, ScaledDot, Softmax
from clearhead.attention.attend import choose
from clearhead.attention.kernels.call import Call
from clearhead.attention.kernels.reference import statistics_dtype
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.masks import Full, Mask

Indices = int | Sequence[int] | slice | range | None
"""Which heads, or which rows: one, several, a slice, or None for all."""

_USUAL: dict[str, Any] = {"scores": ScaledDot(), "weights": Softmax(), "bias": None}
_CELLS = 1 << 24  # how many weights are made at a time where a whole layer is walked through


class VersionedRef:
    """Tensors that are kept by reference, and must be what they were when they are read.

    Those made in `torch.inference_mode()` cannot tell. Ids are not asked: they may lie in a buffer that grows."""

    def __init__(self, what: str, *tensors: Tensor | None) -> None:
        self._what, self.tensors = what, [x for x in tensors if x is not None]
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [x._version for x in self.tensors if x.is_floating_point() and not x.is_inference()]

    def check(self) -> None:
        if self._now() != self._versions:
            raise ConfigError(
                f"{self._what} changed since it ran, and a trace keeps references; ask before the next optimiser step, "
                "and where the model itself writes into a tensor, let it make a new one: x = x + y, not x += y"
            )

    def only(self) -> Tensor:
        """The one tensor that this is about, as it was."""
        self.check()
        return self.tensors[0]


class AttentionCall:
    """One call of attention and what came out of it: of `attend`, asked for the implementation `impl`, or of torch's
    function (None). `edited` is what edits made of its output, (B, H, T, E)."""

    whole: ClassVar[bool] = False
    """Whether heads can be compared only all together, because they were joined before anything could be seen."""

    def __init__(self, call: Call, impl: str | None, out: Tensor, edited: Tensor) -> None:
        self._call, self._impl, self._out, self._edited = call, impl, out, edited
        # Keys and values may lie in a cache, which grows in place and leaves them as they are.
        self._given = VersionedRef("what this attention was given has", call.q, call.bias, *call.learned)
        self._gave = VersionedRef("what this attention gave has", out, edited)

    @property
    def call(self) -> Call:
        """What `attend` was given, or would have been."""
        self._given.check()
        return self._call

    @property
    def out(self) -> Tensor:
        """What the fast path gave: (B, H, T, E), or (B, T, M) where heads were joined."""
        self._gave.check()
        return self._out

    @property
    def how(self) -> str:
        """What ran."""
        if self._impl is None:
            return "scaled_dot_product_attention"
        return f"attend, {choose(self._call, self._impl).name}"

    def heads(self) -> Tensor:
        """(B, H, T, E): what the heads gave, edits included."""
        self._gave.check()
        return self._edited

    def joined(self, heads: Tensor) -> Tensor:
        """(B, h, r, E), what heads give, made comparable with rows of `out`."""
        return heads

    @cached_property
    def wide(self) -> torch.dtype:
        """The dtype in which the reference makes scores and weights of this call."""
        return statistics_dtype(self.call)


def attend_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, *, impl: str = "auto", **how: Any
) -> tuple[Call, str]:
    """The arguments of an `attend` that has run, with references to its tensors, and the implementation asked for."""
    given = {**_USUAL, **how, "query_offset": how.get("query_offset") or 0}
    if given["bias"] is not None:
        given["bias"] = given["bias"].detach()
    return Call(q.detach(), k.detach(), v.detach(), None if isinstance(mask, Full) else mask, **given), impl


def resolve_indices(choice: Indices, size: int, what: str) -> list[int]:
    """A choice as a list of numbers from 0 to size − 1; negative ones count from the end."""
    if choice is None:
        return list(range(size))
    if isinstance(choice, slice):
        return list(range(size))[choice]
    wanted = [choice] if isinstance(choice, int) else list(choice)
    for i in wanted:
        if isinstance(i, bool) or not isinstance(i, int):
            raise DtypeError(f"{what} are {choice!r}; expected a whole number, several, a slice, or None for all")
        if not -size <= i < size:
            raise ShapeError(f"{what} {i} was asked for; this layer has {size}: 0 … {size - 1}")
    return [i % size for i in wanted]


def select_indices(x: Tensor, dim: int, index: list[int]) -> Tensor:
    """The entries of one dimension, as a view where they are a run of numbers."""
    if index and index == list(range(index[0], index[-1] + 1)):
        return x.narrow(dim, index[0], len(index))
    return x.index_select(dim, torch.tensor(index, dtype=torch.long, device=x.device))


@torch.no_grad()
def recompute_weights(call: Call, heads: list[int], rows: list[int], wide: torch.dtype) -> Tensor:
    """(B, h, r, S): who attended to whom, before any dropout, for these heads and rows only; made in `wide`."""
    if isinstance(call.weights, Gumbel):
        raise ConfigError(
            "Gumbel weights are drawn anew at every call, and this draw was not kept; trace it with Softmax weights"
        )
    weights = replace(call.weights, dropout=0.0) if isinstance(call.weights, Softmax) else call.weights
    with call.uncast():
        return weights(*recompute_scores(call, heads, rows, wide))


@torch.no_grad()
def recompute_scores(call: Call, heads: list[int], rows: list[int], wide: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(B, h, r, S) scores with their bias, and which of them count: bool that broadcasts to them, None for all."""
    scores, allowed = _scores(call, heads, rows, wide), None
    if call.mask is not None:
        p = torch.tensor(rows, dtype=torch.long, device=call.q.device)[:, None] + call.query_offset  # (r, 1)
        j = torch.arange(call.S, device=call.q.device)[None]  # (1, S)
        allowed = _of_heads(call.mask.allows(p, j, keys=call.S, query_offset=call.query_offset), heads)
    if call.bias is not None:
        bias = select_indices(call.bias, -2, rows) if call.bias.dim() > 1 and call.bias.shape[-2] > 1 else call.bias
        bias = _of_heads(bias, heads)
        scores = scores + bias.to(wide)
        seen = bias > -math.inf  # −∞ is how a float mask hides a key
        allowed = seen if allowed is None else allowed & seen
    return scores, allowed


def dropout_of(call: Call) -> float:
    return call.weights.dropout if isinstance(call.weights, Softmax) else 0.0


def row_blocks(call: Call, heads: int, rows: list[int]) -> Iterator[list[int]]:
    """The rows in pieces, each of which makes a bounded number of weights."""
    size = max(1, _CELLS // max(1, math.prod(call.q.shape[:-3]) * heads * call.S))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# ---------------------------------------------------------------------- against what really ran


@torch.no_grad()
def max_difference(attended: AttentionCall, heads: list[int], rows: list[int]) -> float:
    """The largest difference between recomputed weights times values and what the fast path gave."""
    call, wide, largest = attended.call, attended.wide, 0.0
    for part in row_blocks(call, len(heads), rows):
        ours = attended.joined(_averaged(call, heads, part, wide, wide))
        out = attended.out if attended.whole else select_indices(attended.out, -3, heads)
        largest = max(largest, _apart(ours, select_indices(out, -2, part)))
    return largest


@torch.no_grad()
def difference_tolerance(attended: AttentionCall, heads: list[int], rows: list[int]) -> float:
    """How large `difference_of` may be.

    The house lets a fast path err at most twice as much against float64 as the reference does in that dtype, and two
    roundings of the largest entry; the recomputation is the reference's arithmetic and may err once more. In float64
    the reference is the yardstick itself: there the bound is that of summing in another order, over D and over S."""
    call, error, largest = attended.call, 0.0, 0.0
    for part in row_blocks(call, len(heads), rows):
        exact = attended.joined(_averaged(call, heads, part, torch.float64, torch.float64))
        plain = attended.joined(_averaged(call, heads, part, attended.wide, call.v.dtype))
        error = max(error, _apart(plain, exact))
        largest = max(largest, float(exact.abs().max()) if exact.numel() else 0.0)
    dtype = attended.out.dtype
    terms = call.q.shape[-1] + call.S if dtype == torch.float64 else 2
    return 3 * error + terms * torch.finfo(dtype).eps * largest


def _averaged(call: Call, heads: list[int], rows: list[int], wide: torch.dtype, dtype: torch.dtype) -> Tensor:
    """(B, h, r, E): weights made in `wide`, times values in `dtype`."""
    return recompute_weights(call, heads, rows, wide).to(dtype) @ expand_kv_heads(call, call.v, heads).to(dtype)


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


# ---------------------------------------------------------------------- the parts of the equation


def _scores(call: Call, heads: list[int], rows: list[int], wide: torch.dtype) -> Tensor:
    """(B, h, r, S). Score functions with weights of their own, maybe a set a head, are asked for all heads first."""
    own = isinstance(call.scores, nn.Module)
    every = list(range(call.q.shape[-3]))
    q = select_indices(select_indices(call.q, -2, rows), -3, every if own else heads).to(wide)
    dot = call.scores.as_dot(q)
    if dot is None:
        return select_indices(call.scores(q, expand_kv_heads(call, call.k, every).to(wide)), -3, heads)
    turned, factor = dot
    return ((select_indices(turned, -3, heads) if own else turned) * factor) @ expand_kv_heads(call, call.k, heads).to(
        wide
    ).mT


def expand_kv_heads(call: Call, x: Tensor, heads: list[int]) -> Tensor:
    """(B, h, S, ·): the keys or values of each of these query heads."""
    return select_indices(x, -3, [head // call.groups for head in heads])


def _of_heads(x: Tensor, heads: list[int]) -> Tensor:
    """These heads of what broadcasts to (B, H, r, S)."""
    return select_indices(x, -3, heads) if x.dim() > 2 and x.shape[-3] > 1 else x
