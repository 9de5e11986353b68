"""Which way a device would go: inside, a run on nothing chooses the kernels that a run on that device would.

Tensors without numbers look like a CPU's to torch. What a GPU does otherwise is put in here: its fused attention (by
dtype and mask, as torch chooses), its dropout, its RMS norm. A call of `attend` with a sparse mask goes by its plan
where the plan promises to be faster, as it would with numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from clearhead.attention import attend
from clearhead.attention.kernels.gathered import blocking_on, saves
from clearhead.attention.kernels.gathered_ops import gathered
from clearhead.attention.plan import Plan, plan
from clearhead.attention.planning.cost import WORTH_PLANNING, rates_of
from clearhead.attention.scores import ScaledDot
from clearhead.attention.weights import Softmax
from clearhead.masks import Causal, Full, Mask, as_mask

PAIR_LETTERS = {10_007: "P", 10_009: "P_g"}
"""Stand for the pairs allowed and the pairs computed, where formulas are read and these have none."""


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
    plan: Plan | None = None  # that runs

    @property
    def dense(self) -> int:
        return self.batch * self.queries * self.keys

    @property
    def sequences(self) -> int:
        """How often the mask's own pairs count: the batch, unless the mask has one."""
        return 1 if self.mask is None or math.prod(self.mask.batch_shape) > 1 else self.batch


def plan_on(device: str, mask: Mask, look: Look, dtype: torch.dtype) -> Plan:
    """The plan of a mask for a call of these sizes, cut as the device's kernels want it."""
    with _disable_current_modes():
        blocking = blocking_on(torch.device(device), dtype, look.width, look.width)
        return plan(mask, look.queries, look.keys, offset=_offset(mask, look), blocking=blocking)


def _offset(mask: Mask, look: Look) -> int | None:
    """Queries that are fewer than the keys stand at their end."""
    return None if look.queries == look.keys or not mask.uses_query_position else max(look.keys - look.queries, 0)


class Ways(TorchFunctionMode):
    """Stands in for torch's functions and for `attend`. `plans` is told the pairs that each plan computes for one head;
    `probe` are the looks of the run whose formulas are read."""

    def __init__(
        self, device: str, path: Callable[[], str], plans: dict[int, int], probe: list[Look] | None = None
    ) -> None:
        super().__init__()
        self.device, self.path, self.plans, self.probe = device, path, plans, probe
        self.looks: list[Look] = []
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if not self._inside and args[0].dim() == 4:
                flag = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
                self.looks.append(self._look(args[0], args[1] if len(args) > 1 else kwargs["key"], None, bool(flag)))
            if self.device == "cuda":
                return _attention(*args, **kwargs)
        elif func is torch.rand and args and args[0] in ([], ()):
            return 1.0  # one draw, by which some models leave out a layer: none is left out
        elif self.device == "cuda" and func in _ON_GPU:
            return _ON_GPU[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _look(self, q: Tensor, k: Tensor, mask: Mask | None, is_causal: bool) -> Look:
        sizes = (q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], q.element_size())
        return Look(self.path(), math.prod(q.shape[:-3]), *sizes, mask, is_causal)

    @contextmanager
    def standing_in(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """The names by which the source files of these modules call `attend` lead here; and libraries that look into
        their tensors to choose a way are told what one plain sequence would tell them."""
        files = {sys.modules[kind.__module__] for module in modules for kind in type(module).__mro__}
        places = [(file, name, self._attend) for file in files for name, value in vars(file).items() if value is attend]
        places += [
            (sys.modules[file], name, told) for file, name, told in _TOLD if hasattr(sys.modules.get(file), name)
        ]
        with ExitStack() as stack:
            for file, name, stand_in in places:
                stack.callback(setattr, file, name, getattr(file, name))
                setattr(file, name, stand_in)
            yield

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, **how: Any) -> Tensor:
        mask = None if mask is None or isinstance(mask, Full) else as_mask(mask)
        look = self._look(q, k, mask, isinstance(mask, Causal) and q.shape[-2] == k.shape[-2])
        look = look if mask is None or look.is_causal else self._counted(look, mask, q, how)
        self.looks.append(look)
        dot = None if look.plan is None else how.get("scores", ScaledDot()).as_dot(q)
        if look.plan is not None and dot is not None:
            self.plans[look.plan.handle] = look.computed or 0
            four = [x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:]) for x in (dot[0], k, v)]
            scale = dot[1] / how.get("weights", Softmax()).temperature
            return gathered(*four, how.get("bias"), look.plan.handle, scale)[0].reshape(*q.shape[:-1], v.shape[-1])
        self._inside = True
        out, self._inside = attend(q, k, v, mask, **how), False
        return out

    def _counted(self, look: Look, mask: Mask, q: Tensor, how: dict[str, Any]) -> Look:
        """With its pairs; where formulas are read, letters stand for those."""
        if self.probe is not None:
            made = next(other for other in self.probe if other.path == look.path).plan
            allowed, computed = (look.sequences * prime for prime in PAIR_LETTERS)
        else:
            made = self._plan(look, mask, q, how)
            with _disable_current_modes():
                allowed = look.sequences * mask.count(look.queries, look.keys, offset=_offset(mask, look))
                computed = 0 if made is None else look.sequences * made.computed
        return replace(look, allowed=allowed, computed=None if made is None else computed, plan=made)

    def _plan(self, look: Look, mask: Mask, q: Tensor, how: dict[str, Any]) -> Plan | None:
        """The plan that would run: asked for by name, or, as `attend` chooses, where it promises to be faster."""
        impl, weights = how.get("impl", "auto"), how.get("weights", Softmax())
        if impl in ("reference", "fused") or not isinstance(weights, Softmax) or weights.dropout:
            return None
        if impl == "auto" and look.queries * look.keys < WORTH_PLANNING:
            return None
        made = plan_on(self.device, mask, look, q.dtype)
        with _disable_current_modes():
            rates = rates_of(torch.device(self.device), q.dtype)
            backward = torch.is_grad_enabled() and q.requires_grad
            is_faster = impl == "gathered" or saves(made, look.batch * look.heads, look.width, backward, rates)
        return made if is_faster else None


# ---------------------------------------------------------------------- what a GPU runs


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention in half precision without a mask, the memory-efficient kernel with one or in float32, and the
    plain steps where neither can: in float64, and where query heads share key heads in another kernel than flash."""
    q, k, v = query, key, value
    ops = torch.ops.aten
    if q.dim() == 4 and q.element_size() == 2 and attn_mask is None and q.shape[-1] == v.shape[-1] <= 256:
        return ops._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if q.dim() != 4 or q.shape[1] != k.shape[1] or q.element_size() == 8:
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


def _rms(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """The kernel of a layer norm reads and writes as much, and keeps as much but for one number a row."""
    return torch.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]


_ON_GPU: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout, torch.dropout: _dropout, F.rms_norm: _rms, torch.rms_norm: _rms,
}  # fmt: skip
# Whether sequences are packed (no), a mask is causal (where torch asks, yes), a bias hides keys (no).
_TOLD: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("transformers.masking_utils", "find_packed_sequence_indices", lambda *_, **__: None),
    ("clearhead.attention.kernels.reference", "_allowed", lambda call, bias: call.allowed()),
    ("torch.nn.modules.transformer", "_detect_is_causal_mask", lambda mask, *_, **__: mask is not None),
)
