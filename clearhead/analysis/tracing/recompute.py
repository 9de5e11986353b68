"""Recompute attention weights from recorded inputs, for the requested heads and rows only.

The arithmetic is that of the reference (`attention/reference.py`): scores, bias and softmax in float32 or
wider, and the mask evaluated for these rows only. Shapes use the project's letters; h heads and r rows are the
selected ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from clearhead.attention import GumbelSoftmax, ScaledDot, Softmax
from clearhead.attention.attend import choose, lower_bias
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.observe import ObservedCall
from clearhead.attention.reference import statistics_dtype
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.masks import Full

Indices = int | Sequence[int] | slice | range | None
"""Indices of heads or rows: one, several, a slice, or None for all."""

WEIGHTS_PER_BLOCK = 1 << 24  # bounds the memory of iterating over a layer


class VersionedRef:
    """References to tensors that must not be modified between recording and reading.

    Tensors created in `torch.inference_mode()` have no version counter and are not checked; neither are ids, which may
    be in a buffer that grows.
    """

    def __init__(self, name: str, *tensors: Tensor | None) -> None:
        self._name = name
        self.tensors = [x for x in tensors if x is not None]
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [x._version for x in self.tensors if x.is_floating_point() and not x.is_inference()]

    def check(self) -> None:
        """Raise ConfigError if a tensor was modified in place."""
        if self._current_versions() != self._versions:
            raise ConfigError(
                f"{self._name} was modified in place since it was recorded, and a trace stores references; read before "
                "the next optimizer step, and use x = x + y instead of x += y in the model"
            )

    def get(self) -> Tensor:
        """Return the single tensor of this reference after checking it."""
        self.check()
        return self.tensors[0]


class AttentionCall:
    """One recorded attention call: of `attend` with the requested implementation `impl`, or of torch's function (None).

    `edited` is the output (B, H, T, E) after interventions.
    """

    heads_merged: ClassVar[bool] = False
    """Whether the heads are already merged in the recorded output, so that only all of them can be compared."""

    def __init__(self, call: AttentionInputs, impl: str | None, out: Tensor, edited: Tensor) -> None:
        self._call = call
        self._impl = impl
        self._out = out
        self._edited = edited
        # Keys and values may be in a cache, which grows in place without changing existing entries.
        self._inputs_ref = VersionedRef("an input of this attention", call.q, *call.biases, *call.score_parameters)
        self._outputs_ref = VersionedRef("the output of this attention", out, edited)

    @property
    def call(self) -> AttentionInputs:
        """The inputs in the form of an `attend` call."""
        self._inputs_ref.check()
        return self._call

    @property
    def out(self) -> Tensor:
        """The recorded output: (B, H, T, E), or (B, T, M) if heads are merged."""
        self._outputs_ref.check()
        return self._out

    @property
    def implementation(self) -> str:
        """The name of the implementation that ran."""
        if self._impl is None:
            return "scaled_dot_product_attention"
        return f"attend, {choose(self._call, self._impl).kernel.name}"

    def heads(self) -> Tensor:
        """Return the outputs of the heads after interventions, (B, H, T, E)."""
        self._outputs_ref.check()
        return self._edited

    def weights(self, heads: list[int], rows: list[int], dtype: torch.dtype) -> Tensor:
        """Return the weights (B, h, r, S) before dropout for these heads and rows, computed in `dtype`."""
        return recompute_weights(self.call, heads, rows, dtype)

    def merge_heads(self, heads: Tensor) -> Tensor:
        """Convert head outputs (B, h, r, E) to the layout of `out`."""
        return heads

    @cached_property
    def acc_dtype(self) -> torch.dtype:
        """The dtype in which the reference computes scores and weights of this call."""
        return statistics_dtype(self.call)


class WrittenOutCall(AttentionCall):
    """One recorded attention that a module computes as softmax(q @ k.T) @ v; its weights are stored.

    Queries and keys are unknown: `call` has the outputs and the values in their place.
    """

    def __init__(self, weights: Tensor, v: Tensor, out: Tensor, edited: Tensor) -> None:
        inputs = AttentionInputs(out, v, v, None, ScaledDot(), Softmax(), None, 0)
        super().__init__(inputs, None, out, edited)
        self._weights_ref = VersionedRef("the weights of this attention", weights)

    @property
    def implementation(self) -> str:
        """The name of the implementation that ran."""
        return "softmax(q @ k.T) @ v"

    def weights(self, heads: list[int], rows: list[int], dtype: torch.dtype) -> Tensor:
        """Return the stored weights (B, h, r, S) for these heads and rows."""
        return select_indices(select_indices(self._weights_ref.get(), -3, heads), -2, rows).to(dtype)


def attention_inputs(call: ObservedCall) -> AttentionInputs:
    """Return the arguments of an observed call, with references to its tensors."""
    q, k = call.q.detach(), call.k.detach()
    bias, distance_bias = lower_bias(call.bias, q, k, call.query_offset)
    return AttentionInputs(
        q,
        k,
        call.v.detach(),
        None if isinstance(call.mask, Full) else call.mask,
        call.scores,
        call.normalizer,
        None if bias is None else bias.detach(),
        call.query_offset or 0,
        distance_bias=None if distance_bias is None else distance_bias.detach(),
    )


def resolve_indices(choice: Indices, size: int, name: str) -> list[int]:
    """Return indices from 0 to size − 1; negative ones count from the end."""
    if choice is None:
        return list(range(size))
    if isinstance(choice, slice):
        return list(range(size))[choice]
    values = [choice] if isinstance(choice, int) or not isinstance(choice, Iterable) else list(choice)
    for i in values:
        if isinstance(i, bool) or not isinstance(i, int):
            raise DtypeError(f"{name} is {choice!r}; expected an integer, several, a slice, or None for all")
        if not -size <= i < size:
            raise ShapeError(f"{name} {i} was asked for; this layer has {size}: 0 … {size - 1}")
    return [i % size for i in values]


def select_indices(x: Tensor, dim: int, index: list[int]) -> Tensor:
    """Select entries of one dimension, as a view if the indices are contiguous."""
    if index and index == list(range(index[0], index[-1] + 1)):
        return x.narrow(dim, index[0], len(index))
    return x.index_select(dim, torch.tensor(index, dtype=torch.long, device=x.device))


@torch.no_grad()
def recompute_weights(call: AttentionInputs, heads: list[int], rows: list[int], acc_dtype: torch.dtype) -> Tensor:
    """Return the weights (B, h, r, S) before dropout for these heads and rows, computed in `acc_dtype`."""
    if isinstance(call.normalizer, GumbelSoftmax):
        raise ConfigError(
            "GumbelSoftmax samples new weights in every call and this one was not stored; trace the layer with Softmax"
        )
    weights = replace(call.normalizer, dropout=0.0) if isinstance(call.normalizer, Softmax) else call.normalizer
    with call.no_autocast():
        return weights(*recompute_scores(call, heads, rows, acc_dtype))


@torch.no_grad()
def recompute_scores(
    call: AttentionInputs, heads: list[int], rows: list[int], acc_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return scores with their bias (B, h, r, S), and a broadcastable bool mask of the visible pairs, None for all."""
    scores = _scores(call, heads, rows, acc_dtype)
    allowed = None
    if call.mask is not None:
        p = torch.tensor(rows, dtype=torch.long, device=call.q.device)[:, None] + call.query_offset  # (r, 1)
        j = torch.arange(call.S, device=call.q.device)[None]  # (1, S)
        allowed = _select_heads(call.mask.allows(p, j, keys=call.S, query_offset=call.query_offset), heads)
    for bias in _bias_rows(call, heads, rows):
        scores = scores + bias.to(acc_dtype)
        visible = bias > -math.inf  # a float mask hides a key by −∞
        allowed = visible if allowed is None else allowed & visible
    return scores, allowed


def _bias_rows(call: AttentionInputs, heads: list[int], rows: list[int]) -> Iterator[Tensor]:
    """Yield the biases of these heads and rows; each broadcasts to (B, h, r, S)."""
    if call.bias is not None:
        bias = select_indices(call.bias, -2, rows) if call.bias.dim() > 1 and call.bias.shape[-2] > 1 else call.bias
        yield _select_heads(bias, heads)
    if call.distance_bias is not None:
        i = torch.tensor(rows, dtype=torch.long, device=call.q.device)[:, None]
        j = torch.arange(call.S, device=call.q.device)
        yield _select_heads(call.distance_bias[:, j - i + (call.T - 1)], heads)


def dropout_of(call: AttentionInputs) -> float:
    return call.normalizer.dropout if isinstance(call.normalizer, Softmax) else 0.0


def row_blocks(call: AttentionInputs, heads: int, rows: list[int]) -> Iterator[list[int]]:
    """Split the rows into blocks with a bounded number of weights."""
    size = max(1, WEIGHTS_PER_BLOCK // max(1, math.prod(call.q.shape[:-3]) * heads * call.S))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# ---------------------------------------------------------------------- comparison with the recorded outputs


@torch.no_grad()
def max_difference(attended: AttentionCall, heads: list[int], rows: list[int]) -> float:
    """Return the largest difference between recomputed weights times values and the recorded output."""
    call = attended.call
    acc_dtype = attended.acc_dtype
    largest = 0.0
    for part in row_blocks(call, len(heads), rows):
        recomputed = attended.merge_heads(_weighted_values(attended, heads, part, acc_dtype, acc_dtype))
        out = attended.out if attended.heads_merged else select_indices(attended.out, -3, heads)
        largest = max(largest, _max_abs_diff(recomputed, select_indices(out, -2, part)))
    return largest


@torch.no_grad()
def difference_tolerance(attended: AttentionCall, heads: list[int], rows: list[int]) -> float:
    """Return the bound for `max_difference`.

    A fast path may differ from float64 by at most twice the error of the reference in that dtype, plus two roundings
    of the largest entry; the recomputation is the reference's arithmetic and may add its error once more. In float64
    the reference is the yardstick, so the bound is that of summing in another order, over D and over S.
    """
    call = attended.call
    error = 0.0
    largest = 0.0
    for part in row_blocks(call, len(heads), rows):
        exact = attended.merge_heads(_weighted_values(attended, heads, part, torch.float64, torch.float64))
        plain = attended.merge_heads(_weighted_values(attended, heads, part, attended.acc_dtype, call.v.dtype))
        error = max(error, _max_abs_diff(plain, exact))
        largest = max(largest, float(exact.abs().max()) if exact.numel() else 0.0)
    dtype = attended.out.dtype
    terms = call.q.shape[-1] + call.S if dtype == torch.float64 else 2
    return 3 * error + terms * torch.finfo(dtype).eps * largest


def _weighted_values(
    attended: AttentionCall, heads: list[int], rows: list[int], acc_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return weights computed in `acc_dtype`, times values in `dtype`, (B, h, r, E)."""
    call = attended.call
    return attended.weights(heads, rows, acc_dtype).to(dtype) @ expand_kv_heads(call, call.v, heads).to(dtype)


def _max_abs_diff(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


# ---------------------------------------------------------------------- terms of the equation


def _scores(call: AttentionInputs, heads: list[int], rows: list[int], acc_dtype: torch.dtype) -> Tensor:
    """Return the scores (B, h, r, S).

    Score functions with parameters, possibly per head, are evaluated for all heads.
    """
    has_parameters = isinstance(call.scores, nn.Module)
    every = list(range(call.q.shape[-3]))
    q = select_indices(select_indices(call.q, -2, rows), -3, every if has_parameters else heads).to(acc_dtype)
    dot = call.scores.as_dot(q)
    if dot is None:
        return select_indices(call.scores(q, expand_kv_heads(call, call.k, every).to(acc_dtype)), -3, heads)
    projected, factor = dot
    return ((select_indices(projected, -3, heads) if has_parameters else projected) * factor) @ expand_kv_heads(
        call, call.k, heads
    ).to(acc_dtype).mT


def expand_kv_heads(call: AttentionInputs, x: Tensor, heads: list[int]) -> Tensor:
    """Return the keys or values of these query heads, (B, h, S, ·)."""
    return select_indices(x, -3, [head // call.groups for head in heads])


def _select_heads(x: Tensor, heads: list[int]) -> Tensor:
    """Select these heads of a tensor that broadcasts to (B, H, r, S)."""
    return select_indices(x, -3, heads) if x.dim() > 2 and x.shape[-3] > 1 else x
