"""Seeing attention from outside: hooks on modules, and stand-ins for the functions that attend, inside a `with` only.

What a layer's `attend` really received (q, k, v, mask, bias) cannot be had from a hook on the layer, because it is made
inside. So, while a watch is on, the names by which the model's own source files call `attend` and torch's
`scaled_dot_product_attention` lead to a stand-in that calls the real function and hands its arguments on: references,
no copies, nothing computed, nothing waited for. Hooks say which module is running, which is the name the call is filed
under, and how far its cache had come. `nn.MultiheadAttention` has several ways to run, some of them a single operator,
so it is watched as a whole. (A hook inside makes `nn.TransformerEncoderLayer` call its parts one by one: that is
torch's own rule.)

Stand-ins are there for the whole process: what another thread runs goes through them too, and is kept apart by the
thread's own stack of modules. Watches may end in any order; one that has ended passes calls on."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._numbers import has_numbers
from clearhead.attention import KVCache, attend
from clearhead.attention.kernels.call import Call
from clearhead.errors import ConfigError
from clearhead.look.edit import Intervention
from clearhead.look.foreign import TorchLayerCall, sdpa_inputs, to_padded
from clearhead.look.recompute import AttentionCall, VersionedRef, attend_inputs
from clearhead.look.record import CallContext, RecordedPaths, RecordStore

InputsReader = Callable[..., tuple[Call, str | None]]
"""Makes a `Call` of a function's arguments, and tells which implementation was asked for where there is a choice."""


class ThreadState(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.running: list[CallContext] = []  # of the modules whose forward is being executed
        self.inside = 0  # stand-ins at work: torch's function inside `attend` is no call of its own


class AttentionRecorder:
    """Hooks and stand-ins, put in place by `start` and taken away by `stop`, whatever happened in between.

    What was asked for is kept, and nothing else; what edits make of it goes on in its place."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        asked: RecordedPaths,
        edits: Mapping[str, list[Intervention]],
        kept: RecordStore,
    ) -> None:
        _reject_compiled(modules)
        self._modules, self._asked, self._edits, self._kept = modules, asked, edits, kept
        self._paths = {module: path for path, module in modules.items()}
        self.made: set[Intervention] = set()
        self._hooked: set[nn.Module] = set()
        self._here, self._calls, self._stack = ThreadState(), itertools.count(1), ExitStack()
        self.on = False
        self.has_run = False  # whether a module that is watched was called

    def start(self, modules: Iterable[nn.Module]) -> None:
        """Hears of these modules, and of those that show how far a cache has come."""
        readers: dict[Any, InputsReader] = {attend: attend_inputs, F.scaled_dot_product_attention: sdpa_inputs}
        try:
            for module in (*_outermost_with_cache(self._paths), *modules):
                self.hook(module)
            for function, reader in readers.items():
                for place, name in _bindings(self._paths, function):
                    self._swap(place, name, functools.partial(self._stand_in, reader=reader))
            self._swap(KVCache, "reorder", self._reorderer)
        except BaseException:
            self.stop()
            raise
        self.on = True

    def stop(self) -> None:
        self.on = False
        self._stack.close()
        self._hooked.clear()
        self._here = ThreadState()

    def hook(self, module: nn.Module) -> None:
        """Hear of this module's calls."""
        if module in self._hooked:
            return
        self._hooked.add(module)
        enter, leave = (functools.partial(hear, self._paths[module]) for hear in (self._enter, self._leave))
        self._stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self._stack.enter_context(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionRecorder:
        """A copy of a model that is being watched has its hooks too; they lead here, where the copy is nobody."""
        return self

    # -- which module is running ------------------------------------------------------------------------------------

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in self._hooked:
            return
        cache: Any = kwargs.get("cache")
        running, moment = self._here.running, CallContext(path, next(self._calls))
        if running and running[-1].cache is not None:  # the outermost knows how far it had come at the start
            moment = replace(running[-1], path=path, call=moment.call)
        elif isinstance(cache, KVCache):
            moment = replace(moment, cache=cache, past=None if cache.holds_memory else cache.length)
        self.has_run = True
        running.append(moment)
        self._keep("input", (*args, *kwargs.values()), moment)

    def _leave(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if module not in self._hooked:
            return None
        running = self._here.running
        while running and running[-1].path != path:  # left behind by an error inside
            running.pop()
        if not running:
            return None
        try:
            # Without an output, nothing was returned or an error passes through.
            return None if output is None else self._returned(module, args, kwargs, output, running[-1])
        finally:
            running.pop()

    def _method(self) -> CallContext | None:
        """Nothing is running, yet something attended: a method of the model that is not its forward, or another."""
        frame = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return CallContext(self._paths[owner], 0) if owner in self._paths else None
            frame = frame.f_back
        return None

    # -- stand-ins ----------------------------------------------------------------------------------------------------

    def _swap(self, place: Any, name: str, stand_in_for: Callable[[Any], Any]) -> None:
        with _LOCK:
            stand_in = stand_in_for(getattr(place, name))
            self._stack.callback(_put_back, place, name, stand_in)
            setattr(place, name, stand_in)

    def _stand_in(self, real: Callable[..., Tensor], reader: InputsReader) -> Callable[..., Tensor]:
        @functools.wraps(real)
        def stand_in(*args: Any, **kwargs: Any) -> Tensor:
            here = self._here
            if not self.on or here.inside:
                return real(*args, **kwargs)
            here.inside += 1
            try:
                output = real(*args, **kwargs)
            finally:
                here.inside -= 1
            now = here.running[-1] if here.running else self._method()
            if now is None:
                return output
            return self._attended(now, functools.partial(reader, *args, **kwargs), output)

        return stand_in

    def _reorderer(self, real: Callable[[KVCache, Tensor], None]) -> Callable[[KVCache, Tensor], None]:
        @functools.wraps(real)
        def reorder(cache: KVCache, rows: Tensor) -> None:
            real(cache, rows)
            if self.on:
                self._kept.reorder(cache, rows)  # parts of a tree are told too, and belong to nobody

        return reorder

    # -- what is kept, and what edits make of it ----------------------------------------------------------------------

    def _returned(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, moment: CallContext
    ) -> Any:
        """What a module returns instead of this; None for no change."""
        before, path = output, moment.path
        if isinstance(module, nn.MultiheadAttention) and (path in self._edits or path in self._asked["weights"]):
            output = self._torch_layer(module, TorchLayerCall.bind_arguments(module, args, kwargs), output, moment)
        x = first_tensor(output)
        edited = None if x is None else self._edited(x, moment, of_heads=False)
        if edited is not None and edited is not x:
            output = replace_first_tensor(output, edited)
        self._keep("output", output, moment)
        return None if output is before else output

    def _attended(self, moment: CallContext, call: Callable[[], tuple[Call, str | None]], output: Tensor) -> Tensor:
        """What attention gives instead of this, which a module called by itself; `call` reads its arguments."""
        if isinstance(self._modules[moment.path], nn.MultiheadAttention):  # heard as a whole, when it returns
            return output
        real = output if output.dim() > 3 else output.unsqueeze(-3)  # torch's function needs no heads
        edited = self._edited(real, moment, of_heads=True)
        if self._keeps("weights", moment):
            seen = AttentionCall(*call(), require_concrete(real).detach(), require_concrete(edited).detach())
            # Without a cache, calls belong together that one call of the module makes over the same keys.
            together = replace(moment, call=(moment.call, seen.call.k.data_ptr(), seen.call.k.shape))
            self._kept.add("weights", seen, real, together)
        return output if edited is real else edited.reshape(output.shape)

    def _torch_layer(
        self, layer: nn.MultiheadAttention, given: dict[str, Any], output: Any, moment: CallContext
    ) -> Any:
        inner = any(edit.heads is not None for edit in self._edits.get(moment.path, ()))
        if inner and output[0].is_nested:
            raise ConfigError(
                f"{moment.path} is given nested tensors, and heads are edited in plain ones; make the "
                "nn.TransformerEncoder with enable_nested_tensor=False"
            )
        seen = TorchLayerCall(layer, given, output[0])
        edited = self._edited(seen.heads(), moment, of_heads=True) if inner else None
        if self._keeps("weights", moment):
            require_concrete(output[0])
            self._kept.add("weights", seen.kept(edited), seen.out, moment)
        return output if edited is None else (seen.given_back(edited), *output[1:])

    def _edited(self, x: Tensor, moment: CallContext, *, of_heads: bool) -> Tensor:
        for edit in self._edits.get(moment.path, ()):
            if (edit.heads is not None) == of_heads:
                self.made.add(edit)
                x = edit.apply(x, moment)
        return x

    def _keep(self, kind: str, value: Any, moment: CallContext) -> None:
        x = first_tensor(value) if self._keeps(kind, moment) else None
        if x is not None:
            x = to_padded(require_concrete(x).detach())
            what = f"what was recorded of {moment.path or 'the model'} has"
            self._kept.add(kind, VersionedRef(what, x), x, moment)

    def _keeps(self, kind: str, moment: CallContext) -> bool:
        """Whether this was asked for, and is a run: in a backward pass, checkpointing runs the model again."""
        return moment.path in self._asked[kind] and torch._C._current_graph_task_id() == -1


_LOCK = threading.Lock()
_GONE: WeakSet[Callable[..., Any]] = WeakSet()
"""Stand-ins of watches that have ended."""


def _put_back(place: Any, name: str, stand_in: Any) -> None:
    """Takes a stand-in away; one that another stands upon stays where it is, and goes with that one."""
    with _LOCK:
        _GONE.add(stand_in)
        found = top = getattr(place, name)
        while found in _GONE:
            found = found.__wrapped__
        if found is not top:
            setattr(place, name, found)


def _reject_compiled(modules: Mapping[str, nn.Module]) -> None:
    """A compiled graph calls neither hooks nor stand-ins."""
    for path, module in modules.items():
        if "_orig_mod" in module._modules:
            what, instead = "is compiled", "what was compiled, its `_orig_mod`, which has the same weights"
        elif getattr(module, "_compiled_call_impl", None) is not None:
            what, instead = "was compiled in place by .compile()", "a copy that was not"
        else:
            continue
        raise ConfigError(f"{path or 'the model'} {what}, and a compiled graph cannot be watched; trace {instead}")


def _outermost_with_cache(paths: Mapping[nn.Module, str]) -> list[nn.Module]:
    """The modules that are given a cache by somebody else than a module that is given one."""
    found: dict[str, nn.Module] = {}
    for module, path in paths.items():  # parents come before their children
        inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
        if not inside and _takes_cache(type(module).forward):
            found[path] = module
    return list(found.values())


@functools.lru_cache(maxsize=1024)
def _takes_cache(forward: Callable[..., Any]) -> bool:
    return "cache" in inspect.signature(forward).parameters


def _bindings(modules: Iterable[nn.Module], function: Callable[..., Any]) -> list[tuple[ModuleType, str]]:
    """Where the source files of these modules (and torch's own) have this function under some name."""
    kinds = {kind for module in modules for kind in type(module).__mro__}
    files = {F, *(sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules)}
    wanted = inspect.unwrap(function)
    return [(file, name) for file in files for name in _names(file, wanted, len(vars(file)))]


@functools.lru_cache(maxsize=4096)
def _names(file: ModuleType, function: Callable[..., Any], size: int) -> tuple[str, ...]:
    """The names that a function has in a file; kept for as long as the file has as many names."""
    return tuple(
        name
        for name, value in list(vars(file).items())
        if isinstance(value, (FunctionType, BuiltinFunctionType)) and inspect.unwrap(value) is function
    )


def require_concrete(x: Tensor) -> Tensor:
    """x, if it will still have its numbers when it is asked for them."""
    if not torch.compiler.is_compiling() and not has_numbers(x):
        raise ConfigError(
            "the model runs inside of torch.func or a FakeTensorMode, whose tensors are nothing outside of it, and a "
            "trace keeps tensors; call the model itself in the `with` block"
        )
    return x


def first_tensor(value: Any) -> Tensor | None:
    """The tensor that is meant where a module returns or is given several things: logits, or the first."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = (value["logits"],) if "logits" in value else tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return None


def replace_first_tensor(value: Any, new: Tensor) -> Any:
    """The same thing with another first tensor: in place of the one that `first_tensor` finds."""
    if isinstance(value, Tensor):
        return new
    parts = dict(value if isinstance(value, Mapping) else enumerate(value))
    holding = (name for name, part in parts.items() if first_tensor(part) is not None)
    name = "logits" if "logits" in parts else next(holding)
    parts[name] = replace_first_tensor(parts[name], new)
    if isinstance(value, Mapping):
        return type(value)(**parts)
    return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
