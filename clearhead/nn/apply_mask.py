"""Apply a mask to all attention calls of a model, including models of other libraries.

    with ch.apply_mask(model, causal() & (window(1024, 0) | every(256))):
        model(ids, labels=ids).loss.backward()

Module hooks track when a selected part of the model runs. During that time an attention observer adds the mask to the
calls of `attend` and of `scaled_dot_product_attention`. Graphs of `torch.compile` notify no observers: there, hooks add
the mask to the arguments of clearhead's layers, and a torch function mode redirects torch's function. All state is kept
per thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.torch_compat import keyed_forward_hooks
from clearhead._core.validation import did_you_mean
from clearhead.attention.attend import attend
from clearhead.attention.observe import AttentionObserver, ObservedCall, Proceed, add_observer, remove_observer
from clearhead.attention.third_party import InterceptSDPA, sdpa_call
from clearhead.errors import ConfigError, DtypeError, MaskError
from clearhead.masks import Mask, as_mask
from clearhead.nn.attention import MultiHeadAttention


class _CompiledState(threading.local):
    """What compiled graphs of one thread read in place of the observers."""

    def __init__(self) -> None:
        self.active: list[_AppliedMask] = []  # masks whose modules are running, innermost last
        self.depth = 0  # nesting depth of attention calls, inside which torch's function is not redirected

    def combine(self, mask: Mask | None) -> Mask:
        """Return `mask` combined with all active masks, and record that they saw an attention call."""
        for applied in self.active:
            applied.saw_attention = True
            mask = applied.mask if mask is None else mask & applied.mask
        assert mask is not None
        return mask


_COMPILED = _CompiledState()


@explain_keywords
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
    compiled with `module.compile()` are compiled once per mask.

    Args:
        model: Any module.
        mask: Pairs that may attend.
        layers: Module paths or patterns such as "model.layers.[02468]". Default: the whole model. Exclude layers that
            attend to another sequence (cross-attention), because positions have no meaning there.

    Raises:
        DtypeError: If the model is not a module.
        ConfigError: If the model ran without calling `scaled_dot_product_attention`, if `layers` matches no module, or
            if the model itself is compiled.
        MaskError: If queries and keys are not positions of one sequence.
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"got a {type(model).__name__}; expected a PyTorch module, such as the model of a pipeline")
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
    """Call `attend`; in a compiled graph, with the masks that `apply_mask` has activated in this thread."""
    if torch.compiler.is_compiling() and _COMPILED.active:
        if options.get("query_offset") is None:
            options["query_offset"] = _query_offset(q.shape[-2], k.shape[-2], mask)
        mask = _COMPILED.combine(mask)
    _COMPILED.depth += 1
    try:
        return attend(q, k, v, mask, **options)
    finally:
        _COMPILED.depth -= 1


class _AppliedMask(AttentionObserver):
    """The state of one `with apply_mask(…)` block."""

    changes_calls = True

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.has_run = False
        self.saw_attention = False
        self._mode = InterceptSDPA(compiled=_redirect_compiled)
        self._running = _RunningModules()

    def on_attend(self, call: ObservedCall, proceed: Proceed) -> Tensor:
        """Run the call with the mask."""
        self.saw_attention = True
        offset = call.query_offset
        if offset is None:
            offset = _query_offset(call.q.shape[-2], call.k.shape[-2], call.mask)
        elif offset and self.mask.depends_on_length:
            raise MaskError(f"{self.mask} depends on the length and cannot be used with a cache that grows")
        return proceed(call.with_mask(self.mask if call.mask is None else call.mask & self.mask, offset))

    def register_hooks(self, modules: Iterable[nn.Module], stack: ExitStack) -> None:
        """Register hooks on `modules`; `stack` removes them."""
        for module in modules:
            stack.enter_context(
                keyed_forward_hooks(module, "apply_mask", pre=self.enter, post=self.leave, prepend=True)
            )
            if module._compiled_call_impl is not None:  # set by `module.compile()`
                stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                module._compiled_call_impl = partial(self.call_compiled, module._compiled_call_impl)
            if isinstance(module, MultiHeadAttention):
                hooks = keyed_forward_hooks(
                    module, "apply_mask layer", pre=self.add_mask, post=self.leave_layer, with_kwargs=True
                )
                stack.enter_context(hooks)

    def call_compiled(self, compiled: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call a compiled module between `enter` and `leave`."""
        self.enter()
        try:
            return compiled(*args, **kwargs)
        finally:
            self.leave()

    def enter(self, *_: object) -> None:
        """Activate the mask when the outermost module starts."""
        if torch.compiler.is_compiling():  # an outer module has already entered; torch 2.11 cannot count in a graph
            return
        self._running.count += 1
        if self._running.count == 1:
            self.has_run = True
            _COMPILED.active.append(self)
            add_observer(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, *_: object) -> None:
        """Deactivate the mask when the outermost module ends."""
        if torch.compiler.is_compiling():
            return
        self._running.count -= 1
        if self._running.count == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            remove_observer(self)
            _COMPILED.active.remove(self)

    def add_mask(self, layer: nn.Module, args: object, kwargs: dict[str, Any]) -> tuple[object, dict[str, object]]:
        """Add the active masks to the arguments of a compiled `MultiHeadAttention`."""
        if not torch.compiler.is_compiling():
            return args, kwargs
        _COMPILED.depth += 1
        if _COMPILED.depth > 1:
            return args, kwargs
        return args, kwargs | {"mask": _COMPILED.combine(kwargs.get("mask"))}

    def leave_layer(self, layer: nn.Module, args: object, output: object) -> None:
        """Undo the nesting depth of `add_mask`."""
        if torch.compiler.is_compiling():
            _COMPILED.depth -= 1


class _RunningModules(threading.local):
    """Number of selected modules that are running in this thread."""

    count = 0


def _redirect_compiled(*args: Any, **kwargs: Any) -> Tensor:
    """Replace one call of `F.scaled_dot_product_attention` in a compiled graph."""
    if not _COMPILED.active or _COMPILED.depth:
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    call = sdpa_call(*args, **kwargs)
    out = attend_with_applied_masks(
        call.q,
        call.k,
        call.v,
        call.mask,
        scores=call.scores,
        normalizer=call.normalizer,
        bias=call.bias,
        query_offset=call.query_offset,
    )
    query = args[0] if args else kwargs["query"]
    return out if query.dim() > 3 else out.squeeze(-3)


def _query_offset(T: int, S: int, mask: Mask | None) -> int:
    """Return the position of the first query: 0, or S − T with a cache."""
    if T == S:
        return 0
    if T > S or (T > 1 and mask is None):
        raise MaskError(
            f"{T} queries attend to {S} keys of another sequence, for which a mask of positions is not defined; select "
            "the self-attention layers with apply_mask(model, mask, layers=…)"
        )
    if mask is None:
        return S - T
    last = torch.tensor(S - 1, device=mask.device)
    if not mask.allows(last, last, keys=S, query_offset=S - T).all():
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
