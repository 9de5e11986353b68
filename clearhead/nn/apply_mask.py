"""Apply a mask to all attention calls of a model, including models of other libraries.

    with ch.apply_mask(model, causal() & (window(1024, 0) | every(256))):
        model(ids, labels=ids).loss.backward()

Module hooks track when a selected part of the model runs. During that time a torch function mode redirects
`scaled_dot_product_attention` to `attend`, with the mask added to the arguments of the call. The state is per thread.
clearhead's own layers get the mask as an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from clearhead._core.validation import did_you_mean
from clearhead.attention.attend import attend
from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import Scaled, ScaledDot, Scores
from clearhead.errors import ConfigError, MaskError
from clearhead.masks import Mask, allow, as_mask, causal
from clearhead.nn.attention import MultiHeadAttention


class _ThreadState(threading.local):
    """The applied masks and the nesting depth of one thread."""

    def __init__(self) -> None:
        self.active: list[_AppliedMask] = []  # masks whose modules are running, innermost last
        self.depth = 0  # nesting depth of `attend` calls, inside which torch's function is not redirected

    def combine(self, mask: Mask | None) -> Mask:
        """Return `mask` combined with all active masks, and record that they saw an attention call."""
        for applied in self.active:
            applied.saw_attention = True
            mask = applied.mask if mask is None else mask & applied.mask
        assert mask is not None
        return mask


_STATE = _ThreadState()


@contextmanager
def apply_mask(model: nn.Module, mask: Mask, *, layers: str | Sequence[str] | None = None) -> Iterator[None]:
    """Restrict every attention call inside `model` to the pairs that `mask` allows.

    The mask is combined with the masks of the model, in forward, backward and generation. Attention goes through
    `attend`, so a sparse mask also saves time. It works with any module that calls `scaled_dot_product_attention`, and
    with clearhead's layers. Attention that is computed by other operations is not affected.

        with ch.apply_mask(model, causal() & window(128, 0), layers="model.layers.*"):
            model.generate(ids)

    In a call with more keys than queries (decoding with a cache) the queries are the last positions. Padding on the
    left counts as positions. Call `backward` inside the `with` block if the model uses activation checkpointing. Layers
    compiled with `module.compile()` are recompiled in each `with` block, so put it around the whole loop.

    Args:
        model: Any module.
        mask: Pairs that may attend.
        layers: Module paths or patterns such as "model.layers.[02468]". Default: the whole model. Exclude layers that
            attend to another sequence (cross-attention), because positions have no meaning there.

    Raises:
        ConfigError: If the model ran without calling `scaled_dot_product_attention`, if `layers` matches no module, or
            if the model itself is compiled.
        MaskError: If queries and keys are not positions of one sequence.
    """
    applied = _AppliedMask(as_mask(mask))
    with ExitStack() as stack:
        # All inner modules, not only the outermost: activation checkpointing runs inner modules alone in backward.
        applied.register_hooks(
            {inner: None for module in _select_modules(model, layers) for inner in module.modules()}, stack
        )
        yield
    if applied.has_run and not applied.saw_attention:
        raise ConfigError(
            f"{type(model).__name__} never called scaled_dot_product_attention, so the mask had no effect; load models "
            "of transformers with attn_implementation='sdpa', and pass need_weights=False to torch.nn layers"
        )


def attend_with_applied_masks(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, **options: Any) -> Tensor:
    """Call `attend` with `mask` combined with the masks that `apply_mask` has activated in this thread."""
    if _STATE.active:
        if options.get("query_offset") is None:
            options["query_offset"] = _query_offset(q.shape[-2], k.shape[-2], mask)
        mask = _STATE.combine(mask)
    _STATE.depth += 1
    try:
        return attend(q, k, v, mask, **options)
    finally:
        _STATE.depth -= 1


def attend_kwargs_from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """Convert the arguments of `F.scaled_dot_product_attention` to those of `attend`; tensors without heads get one."""
    q, k, v = (x if x.dim() > 3 else x.unsqueeze(-3) for x in (query, key, value))
    mask: Mask | None = causal() if is_causal else None
    bias = None
    if attn_mask is not None:
        attn_mask = attn_mask.unsqueeze(-3) if query.dim() <= 3 and attn_mask.dim() > 2 else attn_mask
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], q.shape[-2], k.shape[-2])  # a view, not a (T, S) tensor
        if attn_mask.is_floating_point():
            bias = attn_mask
        else:
            mask = allow(attn_mask)
    scores: Scores = ScaledDot() if scale is None else Scaled(scale)
    return {
        "q": q,
        "k": k,
        "v": v,
        "mask": mask,
        "scores": scores,
        "normalizer": Softmax(dropout=dropout_p),
        "bias": bias,
        "query_offset": 0 if is_causal else None,
    }


class _AppliedMask:
    """The state of one `with apply_mask(…)` block."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.has_run = False
        self.saw_attention = False
        self._mode = _RedirectAttention()
        self._running = _RunningModules()

    def register_hooks(self, modules: Iterable[nn.Module], stack: ExitStack) -> None:
        """Register hooks on `modules`; `stack` removes them."""
        with _LOCK:
            first_id = RemovableHandle.next_id
            for module in modules:
                # Each module gets the same hook ids. Compiled layers have guards on the ids, and with equal ids one
                # compiled graph serves all layers.
                RemovableHandle.next_id = first_id
                stack.callback(module.register_forward_pre_hook(self.enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(self.leave, always_call=True).remove)
                if module._compiled_call_impl is not None:  # set by `module.compile()`
                    stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                    module._compiled_call_impl = partial(self.call_compiled, module._compiled_call_impl)
                if isinstance(module, MultiHeadAttention):
                    stack.callback(module.register_forward_pre_hook(self.add_mask, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self.leave_layer, always_call=True).remove)
            RemovableHandle.next_id = first_id + 4

    def call_compiled(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a compiled module between `enter` and `leave`."""
        self.enter()
        try:
            return compiled(*args, **kwargs)
        finally:
            self.leave()

    def enter(self, *_: Any) -> None:
        """Activate the mask when the outermost module starts."""
        if torch.compiler.is_compiling():  # an outer module has already entered; torch 2.11 cannot count in a graph
            return
        self._running.count += 1
        if self._running.count == 1:
            self.has_run = True
            _STATE.active.append(self)
            self._mode.__enter__()

    def leave(self, *_: Any) -> None:
        """Deactivate the mask when the outermost module ends."""
        if torch.compiler.is_compiling():
            return
        self._running.count -= 1
        if self._running.count == 0:
            self._mode.__exit__(None, None, None)
            _STATE.active.remove(self)

    def add_mask(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Add the active masks to the arguments of a `MultiHeadAttention`."""
        _STATE.depth += 1
        if _STATE.depth > 1:
            return args, kwargs
        return args, kwargs | {"mask": _STATE.combine(kwargs.get("mask"))}

    def leave_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Undo the nesting depth of `add_mask`."""
        _STATE.depth -= 1


class _RunningModules(threading.local):
    """Number of selected modules that are running in this thread."""

    count = 0


class _RedirectAttention(TorchFunctionMode):
    """Redirects torch's attention function to `attend`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not _STATE.depth:
            with _patched_sdpa(self._attend):  # the mode intercepts this function, but not its inner calls
                return func(*args, **kwargs)
        if func is not _SDPA or _STATE.depth:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replace one call of `F.scaled_dot_product_attention`."""
        if not _STATE.active or _STATE.depth:  # called by another thread or by `attend` while the function is patched
            return _SDPA(*args, **kwargs)
        out = attend_with_applied_masks(**attend_kwargs_from_sdpa(*args, **kwargs))
        query = args[0] if args else kwargs["query"]
        return out if query.dim() > 3 else out.squeeze(-3)


_SDPA = F.scaled_dot_product_attention
_LOCK = threading.RLock()


@contextmanager
def _patched_sdpa(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Patch `F.scaled_dot_product_attention`, for functions in torch.nn.functional that call it."""
    with _LOCK:
        original, F.scaled_dot_product_attention = F.scaled_dot_product_attention, replacement
        try:
            yield
        finally:
            F.scaled_dot_product_attention = original


def _query_offset(T: int, S: int, mask: Mask | None) -> int:
    """Return the position of the first query: 0, or S − T with a cache."""
    if T == S:
        return 0
    if T > S or (T > 1 and mask is None):
        raise MaskError(
            f"{T} queries attend to {S} keys of another sequence, for which a mask of positions is not defined; select "
            "the self-attention layers with apply_mask(model, mask, layers=…)"
        )
    if mask is not None and not mask.dense(T, S, query_offset=S - T)[..., -1, -1].all():
        raise MaskError(
            "the last query may not attend to the last key, so the model uses a preallocated cache; use a cache that "
            "grows"
        )
    return S - T


def _select_modules(model: nn.Module, layers: str | Sequence[str] | None) -> list[nn.Module]:
    """Return the outermost modules that match `layers`."""
    if "_orig_mod" in model._modules or getattr(model, "_compiled_call_impl", None) is not None:
        raise ConfigError("the model is compiled, and compiled graphs call no module hooks; compile its layers instead")
    if layers is None:
        return [model]
    modules = dict(model.named_modules())
    selected: dict[str, nn.Module] = {}
    for pattern in [layers] if isinstance(layers, str) else layers:
        paths = [path for path in modules if path == pattern or fnmatchcase(path, pattern)]
        if not paths:
            raise ConfigError(f"the model has no module {pattern!r}; {did_you_mean(pattern, modules)}")
        selected |= {path: modules[path] for path in paths}
    return [module for path, module in selected.items() if not any(path.startswith(f"{outer}.") for outer in selected)]
