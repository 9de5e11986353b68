"""Observe the attention of a module through the torch operations of one run.

Properties detect that something is wrong; these observations identify the cause. They use only the dispatched
operations: the axis of a softmax, the mask added before or multiplied after it, the split into heads, and the scale of
the scores.

    B batch   H heads   T queries   S keys   D head width   M model width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead._core.call_types import Args, Kwargs, Operator

_RANDOM = ("native_dropout", "bernoulli", "rand", "randn", "normal", "multinomial", "uniform", "_fused_dropout")
CAUSES = {  # the explanation of each observation, as the cause of a finding
    "split_by_view": "heads are split by a view without a transpose: (B, T, M) viewed as (B, H, T, D) mixes positions "
    "into heads; view as (B, T, H, D), then transpose(1, 2)",
    "wrong_axis": "the softmax runs over the wrong axis: weights must sum to 1 over the keys, the last axis of the "
    "scores",
    "binary_added": "a 0/1 mask is added to the scores, which shifts them by 1 and masks nothing: add −inf, or "
    "masked_fill",
    "masked_after": "the mask is applied after the softmax: the masked keys still contribute to its sum; mask the "
    "scores before it",
}
_LOW = -5000.0  # scores below this are masked: their weight is 0 in every dtype
# Outputs of these operations do not inherit scales and widths.
_NEW = ("mm", "addmm", "linear", "native_layer_norm", "embedding")


@dataclass
class Observations:
    """Observations of one run."""

    wrong_axis: bool = False  # a softmax over scores that does not run over the keys
    binary_added: bool = False  # a mask of 0 and 1 (or bools) was added to scores
    masked_after: bool = False  # weights were masked after their softmax
    soft_capped: bool = False  # scores went through a tanh
    split_by_view: bool = False  # (B, T, M) was viewed as (B, H, T, D)
    hidden: list[Tensor] = field(default_factory=list)  # (T, S) of each attention: masked in every row and head
    random: list[str] = field(default_factory=list)  # random operations
    scales: list[tuple[float, int, int]] = field(default_factory=list)  # (factor, D, H) of each attention


class NumericsRecorder(TorchDispatchMode):
    """Records `observations` of one run on a batch of `batch` rows and `length` tokens."""

    def __init__(self, batch: int, length: int) -> None:
        super().__init__()
        self.observations = Observations()
        self._batch = batch
        self._length = length
        self._alive: list[Tensor] = []  # keeps memory alive, so that addresses stay unique
        self._scale: dict[int, float] = {}  # by address: product of the constant factors of a tensor
        self._width: dict[int, int] = {}  # by address: D of scores, products of queries and keys
        self._weights: set[int] = set()

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        out = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(out, Tensor):
            self._alive.append(out)
            self._observe(name, args, kwargs, out)
        return result

    def _observe(self, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        if name in _RANDOM:
            self.observations.random.append(name)
        tensors = [x for x in args if isinstance(x, Tensor)]
        if name in ("_softmax", "_safe_softmax"):
            self._observe_softmax(args[0], args[1], out)
        elif name.startswith("_scaled_dot_product"):
            self._observe_sdpa(args, kwargs)
        elif name in ("bmm", "matmul") and len(tensors) == 2:
            a, b = tensors
            if _address(a) in self._weights:
                return  # the weighted sum of the values, not scores
            self._scale[_address(out)] = self._scale.get(_address(a), 1.0) * self._scale.get(_address(b), 1.0)
            self._width[_address(out)] = a.shape[-1]
        else:
            if name in ("view", "_unsafe_view"):
                self._observe_view(tensors[0], out)
            if name in ("add", "sub") and any(self._is_scores(x) for x in tensors):
                self.observations.binary_added |= any(_is_binary(x) for x in tensors)
            if name == "tanh" and self._is_scores(tensors[0]):
                self.observations.soft_capped = True
            if name in ("mul", "masked_fill", "where") and any(_address(x) in self._weights for x in tensors):
                self.observations.masked_after |= any(_is_binary(x) for x in tensors)
            self._inherit(name, args, tensors, out)

    def _observe_softmax(self, scores: Tensor, dim: int, out: Tensor) -> None:
        self._weights.add(_address(out))
        if not self._is_scores(scores):
            return
        self.observations.wrong_axis |= dim % scores.dim() != scores.dim() - 1
        self._record_hidden(scores < _LOW)
        heads = scores.shape[1] if scores.dim() == 4 else max(1, scores.shape[0] // self._batch)
        self.observations.scales.append((self._scale.get(_address(scores), 1.0), self._width[_address(scores)], heads))

    def _observe_sdpa(self, args: Args, kwargs: Kwargs) -> None:
        q: Tensor = args[0]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if isinstance(mask, Tensor):
            self.observations.binary_added |= mask.is_floating_point() and _is_binary(mask)
            self._record_hidden(~mask if mask.dtype == torch.bool else mask < _LOW)
        scale = kwargs.get("scale")
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        self.observations.scales.append((factor * self._scale.get(_address(q), 1.0), q.shape[-1], q.shape[1]))

    def _record_hidden(self, hidden: Tensor) -> None:
        if hidden.dim() >= 2 and hidden.shape[-2] == self._length:
            self.observations.hidden.append(hidden.reshape(-1, *hidden.shape[-2:]).all(0))

    def _observe_view(self, x: Tensor, out: Tensor) -> None:
        # Correct: (B, T, M) → (B, T, H, D), then a transpose to (B, H, T, D).
        if x.dim() != 3 or out.dim() != 4 or x.shape[0] != out.shape[0] or x.shape[1] != self._length:
            return
        H, T, D = out.shape[1:]
        self.observations.split_by_view |= T == self._length and H != T and H > 1 and H * D == x.shape[2]

    def _inherit(self, name: str, args: Sequence[object], tensors: list[Tensor], out: Tensor) -> None:
        """Propagate scale, width and softmax membership from the inputs of an operation to its output."""
        if name in _NEW:
            return
        for x in tensors:
            if _address(x) in self._weights:
                self._weights.add(_address(out))
            if _address(x) in self._scale and _address(x) != _address(out):
                self._scale.setdefault(_address(out), self._scale[_address(x)])
            if _address(x) in self._width:
                self._width.setdefault(_address(out), self._width[_address(x)])
        if name in ("mul", "div") and len(args) > 1 and (constant := _constant(args[1])):
            factor = constant if name == "mul" else 1.0 / constant
            self._scale[_address(out)] = self._scale.get(_address(out), 1.0) * factor

    def _is_scores(self, x: Tensor) -> bool:
        return x.dim() >= 3 and x.shape[-2] == self._length and _address(x) in self._width


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_binary(x: Tensor) -> bool:
    """Return whether x is a mask of 0 and 1 (or bools) that contains both."""
    is_zero, is_one = x == 0, x == 1
    return x.dim() >= 2 and bool((is_zero | is_one).all()) and bool(is_zero.any()) and bool(is_one.any())


def _constant(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.dim() == 0 and value.is_floating_point() else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
