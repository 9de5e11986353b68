"""Which way a device would go: inside, a run on nothing chooses the kernels that a run on that device would.

Tensors without numbers look like a CPU's to torch. What a GPU does otherwise is put in here: its fused attention (by
dtype and mask, as torch chooses), its dropout, its RMS norm. A call of `attend` with a sparse mask goes by its plan
where the plan promises to be faster, as it would with numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from clearhead.attention import attend
from clearhead.attention.kernels.gathered import blocking_on, saves
from clearhead.attention.kernels.gathered_ops import gathered
from clearhead.attention.plan import Plan, plan
from clearhead.attention.planning.cost import WORTH_PLANNING, rates_of
from clearhead.attention.scores import ScaledDot
from clearhead.attention.weights import Softmax
from clearhead.masks import Causal, Full, Mask, as_mask

__all__ = ["Look", "Ways", "planned_pairs"]

_PAIR_LETTERS = (10_007, 10_009)  # stand for the pairs allowed and the pairs computed, where formulas are read


@dataclass(frozen=True)
class Look:
    """One call of attention: its sizes, and who may see whom. Pairs are those of one head, over the batch."""

    path: str
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    itemsize: int
    mask: Mask | None = None
    is_causal: bool = False
    allowed: int | None = None
    computed: int | None = None
    gathers: bool = False
    plan: Plan | None = None

    @property
    def dense(self) -> int:
        return self.batch * self.queries * self.keys


def planned_pairs(mask: Mask, T: int, S: int, *, dtype: torch.dtype, width: int, device: str) -> Plan:
    """The plan of a mask, cut as the device's kernels want it."""
    with unset_fake_temporarily():
        blocking = blocking_on(torch.device(device), dtype, width, width)
        return plan(mask, T, S, offset=_offset(mask, T, S), blocking=blocking)


def _offset(mask: Mask, T: int, S: int) -> int | None:
    """Queries that are fewer than the keys stand at their end."""
    return None if T == S or not mask.uses_query_position else max(S - T, 0)


class Ways(TorchFunctionMode):
    """Stands in for torch's functions and for `attend`. `probe`: the looks of the run whose formulas are read."""

    def __init__(self, device: str, path: Callable[[], str], probe: list[Look] | None = None) -> None:
        super().__init__()
        self.device, self.path, self.probe = device, path, probe
        self.looks: list[Look] = []
        self.plans: dict[int, int] = {}  # by a plan's number: pairs computed for one head
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if not self._inside:
                self._note_plain(*args, **kwargs)
            if self.device == "cuda":
                return _on_gpu(*args, **kwargs)
        elif func is torch.rand and args and not len(args[0] if isinstance(args[0], (list, tuple)) else (1,)):
            return 1.0  # one draw, by which some models leave out a layer: none is left out
        elif self.device == "cuda" and func in _ON_GPU:
            return _ON_GPU[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _note_plain(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> None:
        flags = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | how
        if q.dim() == 4:
            self.looks.append(self._look(q, k, None, is_causal=bool(flags.get("is_causal"))))

    def _look(self, q: Tensor, k: Tensor, mask: Mask | None, **more: Any) -> Look:
        batch = math.prod(q.shape[:-3])
        sizes = (batch, q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], q.element_size())
        return Look(self.path(), *sizes, mask, **more)

    # ------------------------------------------------------------------ attend

    @contextmanager
    def standing_in(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """The names by which the source files of these modules call `attend` lead here; and libraries that look into
        their tensors to choose a way are told what one plain sequence would tell them."""
        files = {sys.modules[kind.__module__] for module in modules for kind in type(module).__mro__}
        places = [(file, name, self._attend) for file in files for name, value in vars(file).items() if value is attend]
        places += [(sys.modules[file], name, told) for file, name, told in _TOLD if hasattr(sys.modules.get(file), name)]
        before = [getattr(file, name) for file, name, _ in places]
        for file, name, stand_in in places:
            setattr(file, name, stand_in)
        try:
            yield
        finally:
            for (file, name, _), value in zip(places, before, strict=True):
                setattr(file, name, value)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, **how: Any) -> Tensor:
        mask = None if mask is None or isinstance(mask, Full) else as_mask(mask)
        look = self._seen(q, k, mask, how)
        self.looks.append(look)
        dot = how.get("scores", ScaledDot()).as_dot(q) if look.gathers else None
        if dot is not None and look.plan is not None:
            self.plans[look.plan.handle] = look.computed or 0
            weights = how.get("weights", Softmax())
            four = [x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:]) for x in (dot[0], k, v)]
            out, _ = gathered(*four, how.get("bias"), look.plan.handle, dot[1] / weights.temperature)
            return out if q.dim() == 4 else out.reshape(*q.shape[:-1], v.shape[-1])
        self._inside = True
        try:
            return attend(q, k, v, mask, **how)
        finally:
            self._inside = False

    def _seen(self, q: Tensor, k: Tensor, mask: Mask | None, how: dict[str, Any]) -> Look:
        """The pairs of this call; where formulas are read, letters stand for those that have none."""
        look = self._look(q, k, mask, is_causal=isinstance(mask, Causal) and q.shape[-2] == k.shape[-2])
        if mask is None or look.is_causal:
            return look
        own = look.batch if math.prod(mask.batch_shape) == 1 else 1  # the batch is the mask's own, or not
        if self.probe is not None:
            known = next(other for other in self.probe if other.path == look.path)
            pairs = {"allowed": own * _PAIR_LETTERS[0], "computed": own * _PAIR_LETTERS[1] if known.gathers else None}
            return Look(**{**vars(look), "gathers": known.gathers, "plan": known.plan, **pairs})
        T, S = look.queries, look.keys
        with unset_fake_temporarily():
            allowed = own * mask.count(T, S, offset=_offset(mask, T, S))
        found = self._plan(q, look, how)
        computed = None if found is None else own * found.computed
        return Look(**{**vars(look), "allowed": allowed, "computed": computed, "gathers": found is not None, "plan": found})

    def _plan(self, q: Tensor, look: Look, how: dict[str, Any]) -> Plan | None:
        """The plan that would run: asked for by name, or, as `attend` chooses, where it promises to be faster."""
        impl, weights = how.get("impl", "auto"), how.get("weights", Softmax())
        assert look.mask is not None
        if impl in ("reference", "fused") or not isinstance(weights, Softmax) or weights.dropout:
            return None
        if impl == "auto" and look.queries * look.keys < WORTH_PLANNING:
            return None
        sizes = {"dtype": q.dtype, "width": look.width, "device": self.device}
        made = planned_pairs(look.mask, look.queries, look.keys, **sizes)
        with unset_fake_temporarily():
            rates = rates_of(torch.device(self.device), q.dtype)
            backward = torch.is_grad_enabled() and q.requires_grad
            if impl == "gathered" or saves(made, look.batch * look.heads, look.width, backward, rates):
                return made
        return None


# ---------------------------------------------------------------------- what a GPU runs


def _on_gpu(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Flash attention in half precision without a mask, the memory-efficient kernel with one or in float32, and the
    plain steps where neither can: in float64, and where query heads share key heads in another kernel than flash."""
    ops = torch.ops.aten
    grouped = q.dim() == 4 and q.shape[1] != k.shape[1]
    half = q.element_size() == 2
    if q.dim() == 4 and half and attn_mask is None and q.shape[-1] == v.shape[-1] <= 256:
        return ops._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if q.dim() != 4 or grouped or q.element_size() == 8:
        plain = ops._scaled_dot_product_attention_math
        return plain(q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return ops._scaled_dot_product_efficient_attention(q, k, v, attn_mask, learns, dropout_p, is_causal, scale=scale)[0]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and 0.0 < p < 1.0 else x


def _rms(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """The kernel of a layer norm reads and writes as much, and keeps as much but for one number a row."""
    return torch.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]


# Whether sequences are packed (they are not), and whether a mask is causal (where torch asks, it is).
_TOLD: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("transformers.masking_utils", "find_packed_sequence_indices", lambda *_, **__: None),
    ("torch.nn.modules.transformer", "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: mask is not None),
)
_ON_GPU: dict[Any, Callable[..., Tensor]] = {F.dropout: _dropout, torch.dropout: _dropout, F.rms_norm: _rms, torch.rms_norm: _rms}
