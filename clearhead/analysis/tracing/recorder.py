"""Record attention from outside the model, with module hooks and with wrappers of the attention functions.

The inputs of a layer's `attend` (q, k, v, mask, bias) are computed inside the layer, so a hook on the layer cannot read
them. While a recorder is active, the names by which the model's source files call `attend` and torch's
`scaled_dot_product_attention` therefore refer to a wrapper, which calls the original function and stores references to
its arguments. Nothing is copied, computed or synchronized. Hooks identify the running module, to which a call is
assigned, and the length of its cache. `nn.MultiheadAttention` has several code paths, some of them one fused operator,
so it is recorded as one call. (Because of a rule of torch, a hook inside `nn.TransformerEncoderLayer` makes it call its
submodules one by one.)

Wrappers are installed for the whole process. A thread-local stack of modules distinguishes calls of other
threads, which pass through. Recorders may stop in any order; a stopped one passes calls through.
"""

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

from clearhead._core.tensor_state import is_concrete
from clearhead.analysis.tracing.activation_store import CallContext, RecordedPaths, RecordStore
from clearhead.analysis.tracing.edits import Intervention
from clearhead.analysis.tracing.recompute import AttentionCall, VersionedRef, attend_inputs
from clearhead.analysis.tracing.torch_layers import TorchLayerCall, sdpa_inputs, to_padded
from clearhead.attention import attend
from clearhead.attention.inputs import AttentionInputs
from clearhead.errors import ConfigError
from clearhead.nn import KVCache

InputsReader = Callable[..., tuple[AttentionInputs, str | None]]
"""Converts the arguments of an attention function to `AttentionInputs` and returns them with the requested
implementation, if any."""


class ThreadState(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.running: list[CallContext] = []  # contexts of the modules whose forward is running
        self.depth = 0  # nesting of wrappers: torch's function inside `attend` is not recorded separately


class AttentionRecorder:
    """Hooks and wrappers that `start` installs and `stop` always removes; they record the requested activations and
    apply interventions.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        recorded_paths: RecordedPaths,
        edits: Mapping[str, list[Intervention]],
        store: RecordStore,
    ) -> None:
        _reject_compiled(modules)
        self._modules, self._recorded_paths, self._edits, self._store = modules, recorded_paths, edits, store
        self._paths = {module: path for path, module in modules.items()}
        self.applied: set[Intervention] = set()
        self._hooked: set[nn.Module] = set()
        self._thread, self._calls, self._stack = ThreadState(), itertools.count(1), ExitStack()
        self.on = False
        self.has_run = False  # whether a hooked module was called

    def start(self, modules: Iterable[nn.Module]) -> None:
        """Register hooks on these modules and on those whose calls reveal the cache length, and install
        the wrappers."""
        readers: dict[Any, InputsReader] = {attend: attend_inputs, F.scaled_dot_product_attention: sdpa_inputs}
        try:
            for module in (*_outermost_with_cache(self._paths), *modules):
                self.hook(module)
            for function, reader in readers.items():
                for place, name in _bindings(self._paths, function):
                    self._replace_function(place, name, functools.partial(self._wrap_attention, reader=reader))
            self._replace_function(KVCache, "reorder", self._wrap_reorder)
        except BaseException:
            self.stop()
            raise
        self.on = True

    def stop(self) -> None:
        self.on = False
        self._stack.close()
        self._hooked.clear()
        self._thread = ThreadState()

    def hook(self, module: nn.Module) -> None:
        """Register hooks on this module."""
        if module in self._hooked:
            return
        self._hooked.add(module)
        enter, leave = (functools.partial(callback, self._paths[module]) for callback in (self._enter, self._leave))
        self._stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self._stack.enter_context(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionRecorder:
        """Return the recorder itself: the hooks of a copied model ignore the copy."""
        return self

    # -- running modules --------------------------------------------------------------------------------------------

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in self._hooked:
            return
        cache: Any = kwargs.get("cache")
        running, context = self._thread.running, CallContext(path, next(self._calls))
        if running and running[-1].cache is not None:  # the outermost module read the cache length at its start
            context = replace(running[-1], path=path, call=context.call)
        elif isinstance(cache, KVCache):
            context = replace(context, cache=cache, past=None if cache.is_cross else cache.length)
        self.has_run = True
        running.append(context)
        self._record("input", (*args, *kwargs.values()), context)

    def _leave(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if module not in self._hooked:
            return None
        running = self._thread.running
        while running and running[-1].path != path:  # left over from an exception
            running.pop()
        if not running:
            return None
        try:
            # Without an output, the module returned None or an exception propagates.
            return None if output is None else self._on_output(module, args, kwargs, output, running[-1])
        finally:
            running.pop()

    def _context_from_stack(self) -> CallContext | None:
        """Return the context of a method of the model that attends although no hooked module is running."""
        frame = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return CallContext(self._paths[owner], 0) if owner in self._paths else None
            frame = frame.f_back
        return None

    # -- wrappers -----------------------------------------------------------------------------------------------------

    def _replace_function(self, place: Any, name: str, make_wrapper: Callable[[Any], Any]) -> None:
        with _LOCK:
            wrapper = make_wrapper(getattr(place, name))
            self._stack.callback(_restore_function, place, name, wrapper)
            setattr(place, name, wrapper)

    def _wrap_attention(self, original: Callable[..., Tensor], reader: InputsReader) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            thread = self._thread
            if not self.on or thread.depth:
                return original(*args, **kwargs)
            thread.depth += 1
            try:
                output = original(*args, **kwargs)
            finally:
                thread.depth -= 1
            context = thread.running[-1] if thread.running else self._context_from_stack()
            if context is None:
                return output
            return self._on_attention(context, functools.partial(reader, *args, **kwargs), output)

        return wrapper

    def _wrap_reorder(self, original: Callable[[KVCache, Tensor], None]) -> Callable[[KVCache, Tensor], None]:
        @functools.wraps(original)
        def reorder(cache: KVCache, rows: Tensor) -> None:
            original(cache, rows)
            if self.on:
                self._store.reorder(cache, rows)  # sub-caches are reordered too, but have no separate record

        return reorder

    # -- recording and interventions ---------------------------------------------------------------------------------

    def _on_output(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, context: CallContext
    ) -> Any:
        """Return the replacement for the output of a module, or None for no change."""
        before, path = output, context.path
        if isinstance(module, nn.MultiheadAttention) and (
            path in self._edits or path in self._recorded_paths["weights"]
        ):
            output = self._on_torch_layer(module, TorchLayerCall.bind_arguments(module, args, kwargs), output, context)
        x = first_tensor(output)
        edited = None if x is None else self._intervene(x, context, of_heads=False)
        if edited is not None and edited is not x:
            output = replace_first_tensor(output, edited)
        self._record("output", output, context)
        return None if output is before else output

    def _on_attention(
        self, context: CallContext, call: Callable[[], tuple[AttentionInputs, str | None]], output: Tensor
    ) -> Tensor:
        """Return the replacement for the output of an attention function; `call` reads its arguments."""
        if isinstance(self._modules[context.path], nn.MultiheadAttention):
            return output  # recorded as one call when the layer returns
        # Torch's function accepts tensors without heads.
        original = output if output.dim() > 3 else output.unsqueeze(-3)
        edited = self._intervene(original, context, of_heads=True)
        if self._is_recorded("weights", context):
            call_record = AttentionCall(*call(), require_concrete(original).detach(), require_concrete(edited).detach())
            # Without a cache, calls over the same keys within one call of the module belong to one run.
            shared_context = replace(
                context, call=(context.call, call_record.call.k.data_ptr(), call_record.call.k.shape)
            )
            self._store.add("weights", call_record, original, shared_context)
        return output if edited is original else edited.reshape(output.shape)

    def _on_torch_layer(
        self, layer: nn.MultiheadAttention, arguments: dict[str, Any], output: Any, context: CallContext
    ) -> Any:
        inner = any(edit.heads is not None for edit in self._edits.get(context.path, ()))
        if inner and output[0].is_nested:
            raise ConfigError(
                f"{context.path} receives nested tensors, in which heads cannot be edited; create the "
                "nn.TransformerEncoder with enable_nested_tensor=False"
            )
        call_record = TorchLayerCall(layer, arguments, output[0])
        edited = self._intervene(call_record.heads(), context, of_heads=True) if inner else None
        if self._is_recorded("weights", context):
            require_concrete(output[0])
            self._store.add("weights", call_record.detached(edited), call_record.out, context)
        return output if edited is None else (call_record.layer_output(edited), *output[1:])

    def _intervene(self, x: Tensor, context: CallContext, *, of_heads: bool) -> Tensor:
        for edit in self._edits.get(context.path, ()):
            if (edit.heads is not None) == of_heads:
                self.applied.add(edit)
                x = edit.apply(x, context)
        return x

    def _record(self, kind: str, value: Any, context: CallContext) -> None:
        x = first_tensor(value) if self._is_recorded(kind, context) else None
        if x is not None:
            x = to_padded(require_concrete(x).detach())
            description = f"the recorded activation of {context.path or 'the model'}"
            self._store.add(kind, VersionedRef(description, x), x, context)

    def _is_recorded(self, kind: str, context: CallContext) -> bool:
        """Return whether this activation is requested and not part of the recomputation in a backward pass."""
        return context.path in self._recorded_paths[kind] and torch._C._current_graph_task_id() == -1


_LOCK = threading.Lock()
_REMOVED: WeakSet[Callable[..., Any]] = WeakSet()
"""Wrappers of recorders that have stopped."""


def _restore_function(place: Any, name: str, wrapper: Any) -> None:
    """Remove a wrapper. If another wrapper was installed on top, defer removal until that one is removed."""
    with _LOCK:
        _REMOVED.add(wrapper)
        top = getattr(place, name)
        function = top
        while function in _REMOVED:
            function = function.__wrapped__
        if function is not top:
            setattr(place, name, function)


def _reject_compiled(modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError if a module is compiled, because compiled graphs call neither hooks nor wrappers."""
    for path, module in modules.items():
        if "_orig_mod" in module._modules:
            description, instead = "is compiled", "its `_orig_mod`, which has the same parameters"
        elif getattr(module, "_compiled_call_impl", None) is not None:
            description, instead = "was compiled in place by .compile()", "a copy that is not compiled"
        else:
            continue
        raise ConfigError(
            f"{path or 'the model'} {description}, and a compiled graph cannot be traced; trace {instead}"
        )


def _outermost_with_cache(paths: Mapping[nn.Module, str]) -> list[nn.Module]:
    """Return the modules that take a cache and are not inside another module that takes one."""
    modules: dict[str, nn.Module] = {}
    for module, path in paths.items():  # parents come before their children
        is_inner = any(not outer or path.startswith(f"{outer}.") for outer in modules)
        if not is_inner and _takes_cache(type(module).forward):
            modules[path] = module
    return list(modules.values())


@functools.lru_cache(maxsize=1024)
def _takes_cache(forward: Callable[..., Any]) -> bool:
    return "cache" in inspect.signature(forward).parameters


def _bindings(modules: Iterable[nn.Module], function: Callable[..., Any]) -> list[tuple[ModuleType, str]]:
    """Return where the source files of these modules (and torch's own) bind this function to a name."""
    kinds = {kind for module in modules for kind in type(module).__mro__}
    files = {F, *(sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules)}
    original = inspect.unwrap(function)
    return [(file, name) for file in files for name in _names(file, original, len(vars(file)))]


@functools.lru_cache(maxsize=4096)
def _names(file: ModuleType, function: Callable[..., Any], size: int) -> tuple[str, ...]:
    """Return the names of a function in a module; cached while the module has the same number of names."""
    return tuple(
        name
        for name, value in list(vars(file).items())
        if isinstance(value, (FunctionType, BuiltinFunctionType)) and inspect.unwrap(value) is function
    )


def require_concrete(x: Tensor) -> Tensor:
    """Return x, or raise ConfigError if its values will not exist later."""
    if not torch.compiler.is_compiling() and not is_concrete(x):
        raise ConfigError(
            "the model runs under torch.func or FakeTensorMode, whose tensors have no values later, so a trace cannot "
            "store them; call the model itself in the `with` block"
        )
    return x


def first_tensor(value: Any) -> Tensor | None:
    """Return the main tensor of an input or output with several values: the logits, or the first tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = (value["logits"],) if "logits" in value else tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((x for x in map(first_tensor, value) if x is not None), None)
    return None


def replace_first_tensor(value: Any, new: Tensor) -> Any:
    """Return the same structure with the tensor that `first_tensor` finds replaced."""
    if isinstance(value, Tensor):
        return new
    parts = dict(value if isinstance(value, Mapping) else enumerate(value))
    names = (name for name, part in parts.items() if first_tensor(part) is not None)
    name = "logits" if "logits" in parts else next(names)
    parts[name] = replace_first_tensor(parts[name], new)
    if isinstance(value, Mapping):
        return type(value)(**parts)
    return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
