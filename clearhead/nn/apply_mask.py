"""A mask under every attention call of a module, whoever wrote it.

    with ch.under(model, causal() & (window(1024, 0) | every(256))):
        model(ids, labels=ids).loss.backward()

Hooks say when a chosen part of the model runs. While one does, in whichever thread, calls of torch's
`scaled_dot_product_attention` go through `attend`, with the mask beside what they were given; our own layers are handed
the mask as an argument."""

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


class _Here(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []  # whose modules are running, innermost last
        self.ours = 0  # calls of `attend` at work: torch's function inside of them is no call of its own

    def added(self, mask: Mask | None) -> Mask:
        """This mask with those that the thread is under; an attention call asks for it."""
        for block in self.blocks:
            block.has_met = True
            mask = block.mask if mask is None else mask & block.mask
        assert mask is not None
        return mask


_HERE = _Here()


@contextmanager
def under(model: nn.Module, mask: Mask, *, layers: str | Sequence[str] | None = None) -> Iterator[None]:
    """Every attention call inside of `model` sees only what `mask` allows, too, and takes the time that it promises.

    It works on any module that calls `scaled_dot_product_attention` and on ours: forward, backward, generation.
    `layers` are paths of modules, or patterns such as "model.layers.[02468]"; by default it is the whole model. In a
    call with more keys than queries (a cache) the queries are the last of the keys; a model that also attends to
    another sequence needs `layers` that leave those calls out. Where keys are padded on the left, positions count the
    padding. Call `backward` inside, where layers are recomputed. Layers that are compiled, each by itself, are compiled
    anew in every block: put it around the whole loop. Attention that is written out by hand cannot be seen: if no call
    is, the end of the block says so."""
    block = _Block(as_mask(mask))
    with ExitStack() as stack:
        # All modules inside, not only the outermost: those that are recomputed in the backward pass run by themselves.
        block.watch({inner: None for part in _parts(model, layers) for inner in part.modules()}, stack)
        yield
    if block.has_run and not block.has_met:
        raise ConfigError(
            f"the mask was under no attention: {type(model).__name__} never called scaled_dot_product_attention; "
            "load a model of transformers with attn_implementation='sdpa', and ask torch.nn's layers for no weights"
        )


def attend_under(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, **how: Any) -> Tensor:
    """`attend`, with the mask that this thread's module is under, if any."""
    if _HERE.blocks:
        if how.get("query_offset") is None:
            how["query_offset"] = _offset(q.shape[-2], k.shape[-2], mask)
        mask = _HERE.added(mask)
    _HERE.ours += 1
    try:
        return attend(q, k, v, mask, **how)
    finally:
        _HERE.ours -= 1


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """The arguments of `F.scaled_dot_product_attention` as those of `attend`; tensors without heads get one."""
    q, k, v = (x if x.dim() > 3 else x.unsqueeze(-3) for x in (query, key, value))
    mask: Mask | None = causal() if is_causal else None
    bias = None
    if attn_mask is not None:
        attn_mask = attn_mask.unsqueeze(-3) if query.dim() <= 3 and attn_mask.dim() > 2 else attn_mask
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], q.shape[-2], k.shape[-2])  # a view: no T × S is made
        if attn_mask.is_floating_point():
            bias = attn_mask
        else:
            mask = allow(attn_mask)
    scores: Scores = ScaledDot() if scale is None else Scaled(scale)
    how = {
        "scores": scores,
        "normalizer": Softmax(dropout=dropout_p),
        "bias": bias,
        "query_offset": 0 if is_causal else None,
    }
    return {"q": q, "k": k, "v": v, "mask": mask} | how


class _Block:
    """One `with under(…)`: its mask, whether anything ran in it, and whether that met any attention."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.has_run = False
        self.has_met = False
        self._mode = _Mode()
        self._depth = _Depth()

    def watch(self, modules: Iterable[nn.Module], stack: ExitStack) -> None:
        """Hooks on modules, which the stack takes off again."""
        with _LOCK:
            first = RemovableHandle.next_id
            for module in modules:
                # The same numbers everywhere: a compiled layer looks at them, and is to serve for all layers.
                RemovableHandle.next_id = first
                stack.callback(module.register_forward_pre_hook(self.enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(self.leave, always_call=True).remove)
                if module._compiled_call_impl is not None:  # by `module.compile()`
                    stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                    module._compiled_call_impl = partial(self.around, module._compiled_call_impl)
                if isinstance(module, MultiHeadAttention):
                    stack.callback(module.register_forward_pre_hook(self.begin, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self.end, always_call=True).remove)
            RemovableHandle.next_id = first + 4

    def around(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.enter()
        try:
            return compiled(*args, **kwargs)
        finally:
            self.leave()

    def enter(self, *_: Any) -> None:
        if torch.compiler.is_compiling():  # a module around this graph has entered; torch 2.11 cannot count inside
            return
        self._depth.value += 1
        if self._depth.value == 1:
            self.has_run = True
            _HERE.blocks.append(self)
            self._mode.__enter__()

    def leave(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth.value -= 1
        if self._depth.value == 0:
            self._mode.__exit__(None, None, None)
            _HERE.blocks.remove(self)

    def begin(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """One of our own layers: it takes the mask as an argument."""
        _HERE.ours += 1
        return args, kwargs if _HERE.ours > 1 else kwargs | {"mask": _HERE.added(kwargs.get("mask"))}

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        _HERE.ours -= 1


class _Depth(threading.local):
    value = 0  # modules of the block that are running in this thread


class _Mode(TorchFunctionMode):
    """Torch's attention becomes ours, while this is the mode of the running thread."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not _HERE.ours:
            with _swapped(self._attend):  # a mode sees the function, and not what it calls
                return func(*args, **kwargs)
        if func is not _SDPA or _HERE.ours:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        if not _HERE.blocks or _HERE.ours:  # another thread's call, or ours, while the function is swapped
            return _SDPA(*args, **kwargs)
        out = attend_under(**from_sdpa(*args, **kwargs))
        query = args[0] if args else kwargs["query"]
        return out if query.dim() > 3 else out.squeeze(-3)


_SDPA = F.scaled_dot_product_attention
_LOCK = threading.RLock()


@contextmanager
def _swapped(stand_in: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, torch's own files call `stand_in` in place of its attention."""
    with _LOCK:
        before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, stand_in
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before


def _offset(T: int, S: int, mask: Mask | None) -> int:
    """Where the first query stands among the keys: at the front, or, with a cache, so that the last is the last key."""
    if T == S:
        return 0
    if T > S or (T > 1 and mask is None):
        raise MaskError(
            f"{T} queries attend to {S} keys of another sequence, where a mask of positions has no meaning; "
            "name the layers that it is for, under(model, mask, layers=…)"
        )
    if mask is not None and not mask.dense(T, S, query_offset=S - T)[..., -1, -1].all():
        raise MaskError("the last query may not see the last key, so this cache has empty room; use one that grows")
    return S - T


def _parts(model: nn.Module, layers: str | Sequence[str] | None) -> list[nn.Module]:
    """The outermost modules that are meant."""
    if "_orig_mod" in model._modules or getattr(model, "_compiled_call_impl", None) is not None:
        raise ConfigError("the model is compiled, and a compiled graph calls no hooks; compile its layers")
    if layers is None:
        return [model]
    paths = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in [layers] if isinstance(layers, str) else layers:
        matches = [path for path in paths if path == pattern or fnmatchcase(path, pattern)]
        if not matches:
            raise ConfigError(f"the model has no module {pattern!r}; {did_you_mean(pattern, paths)}")
        found |= {path: paths[path] for path in matches}
    return [part for path, part in found.items() if not any(path.startswith(f"{outer}.") for outer in found)]
