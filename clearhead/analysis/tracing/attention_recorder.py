"""Record attention from outside the model, with module hooks and an attention observer.

The inputs of a layer's `attend` (q, k, v, mask, bias) are computed inside the layer, so a hook on the layer cannot read
them. The recorder therefore observes attention calls (`clearhead.attention.observe`) and stores references to their
arguments. Nothing is copied, computed or synchronized. Hooks identify the running module, to which a call is assigned,
and the length of its cache. While a third-party module runs, a torch function mode also intercepts torch's
`scaled_dot_product_attention`. `nn.MultiheadAttention` has several code paths, some of them one fused operator, so it
is recorded as one call. (Because of a rule of torch, a hook inside `nn.TransformerEncoderLayer` makes it call its
submodules one by one.)

The state is per thread: the recorder observes the thread that started it, and every other thread while a hooked module
runs there.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.call_types import Args, Kwargs
from clearhead._core.tensor_state import is_concrete
from clearhead.analysis.inputs.outputs import first_tensor, replace_first_tensor
from clearhead.analysis.tracing.activation_store import CallContext, RecordedPaths, RecordStore
from clearhead.analysis.tracing.call_analysis import calls_torch_attention
from clearhead.analysis.tracing.edits import Intervention
from clearhead.analysis.tracing.recompute import AttentionCall, VersionedRef, WrittenOutCall, attention_inputs
from clearhead.analysis.tracing.torch_layers import TorchLayerCall, to_padded
from clearhead.attention.observe import (
    OBSERVERS,
    AttentionObserver,
    ObservedCall,
    Proceed,
    add_observer,
    remove_observer,
)
from clearhead.attention.third_party import InterceptSDPA
from clearhead.errors import ConfigError
from clearhead.nn import KVCache


class ThreadState(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.running: list[CallContext] = []  # contexts of the modules whose forward is running
        self.added_observer = False  # whether the running modules registered the observer
        self.mode: InterceptSDPA | None = None  # set while torch's function is intercepted


class AttentionRecorder(AttentionObserver):
    """Hooks and an observer that `start` installs and `stop` always removes.

    They record the requested activations and apply interventions.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        recorded_paths: RecordedPaths,
        edits: Mapping[str, list[Intervention]],
        store: RecordStore,
    ) -> None:
        _reject_compiled(modules)
        self._modules = modules
        self._recorded_paths = recorded_paths
        self._edits = edits
        self._store = store
        self._paths = {module: path for path, module in modules.items()}
        self._intercepted = {path for path, module in modules.items() if calls_torch_attention(module)}
        self.applied: set[Intervention] = set()
        self._hooked: set[nn.Module] = set()
        self._thread = ThreadState()
        self._calls = itertools.count(1)
        self._stack = ExitStack()
        self.on = False
        self.has_run = False  # whether a hooked module was called

    def start(self, modules: Iterable[nn.Module]) -> None:
        """Register hooks on these modules and on those whose calls reveal the cache length, and the observer."""
        try:
            for module in (*_outermost_with_cache(self._paths), *modules):
                self.hook(module)
            add_observer(self)
        except BaseException:
            self.stop()
            raise
        self.on = True

    def stop(self) -> None:
        """Remove hooks and observer."""
        self.on = False
        self._stack.close()
        self._hooked.clear()
        self._intercept(False)
        remove_observer(self)
        self._thread = ThreadState()

    def hook(self, module: nn.Module) -> None:
        """Register hooks on this module."""
        if module in self._hooked:
            return
        self._hooked.add(module)
        path = self._paths[module]
        enter = functools.partial(self._enter, path)
        leave = functools.partial(self._leave, path)
        self._stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self._stack.enter_context(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def __deepcopy__(self, memo: dict[int, object]) -> AttentionRecorder:
        """Return the recorder itself: the hooks of a copied model ignore the copy."""
        return self

    # -- running modules --------------------------------------------------------------------------------------------

    def _enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> None:
        if module not in self._hooked:
            return
        kwargs = kwargs or {}  # absent if another thread calls the module while this one registers the hook
        cache = kwargs.get("cache")
        running = self._thread.running
        context = CallContext(path, next(self._calls))
        if running and running[-1].cache is not None:  # the outermost module read the cache length at its start
            context = replace(running[-1], path=path, call=context.call)
        elif isinstance(cache, KVCache):
            context = replace(context, cache=cache, past=None if cache.is_cross else cache.length)
        self.has_run = True
        if not running and self not in OBSERVERS.get():  # another thread than the one that started the recorder
            add_observer(self)
            self._thread.added_observer = True
        running.append(context)
        self._intercept(path in self._intercepted)
        self._record("input", (*args, *kwargs.values()), context)

    def _leave(self, path: str, module: nn.Module, args: Args, *kwargs_and_output: Any) -> object:
        if module not in self._hooked:
            return None
        *named, output = kwargs_and_output
        kwargs: Kwargs = named[0] if named else {}  # absent as in `_enter`
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
            self._intercept(bool(running) and running[-1].path in self._intercepted)
            if not running and self._thread.added_observer:
                remove_observer(self)
                self._thread.added_observer = False

    def _intercept(self, on: bool) -> None:
        """Intercept torch's attention function in this thread, or stop doing so."""
        thread = self._thread
        if on and thread.mode is None:
            thread.mode = InterceptSDPA()
            thread.mode.__enter__()
        elif not on and thread.mode is not None:
            thread.mode.__exit__(None, None, None)
            thread.mode = None

    # -- observed calls -----------------------------------------------------------------------------------------------

    def on_attend(self, call: ObservedCall, proceed: Proceed) -> Tensor:
        """Run the call, record it and apply the interventions on heads."""
        output = proceed(call)
        context = self._thread.running[-1] if self._thread.running else self._context_of_scores(call)
        return output if context is None or not self.on else self._on_attention(context, call, output)

    def on_written_out(self, weights: Tensor, v: Tensor, output: Tensor) -> Tensor:
        """Record attention that is written out, and apply the interventions on heads."""
        if not self.on or not self._thread.running:
            return output
        context = self._thread.running[-1]
        edited = self._intervene(output, context, of_heads=True)
        if self._is_recorded("weights", context):
            tensors = (require_concrete(x).detach() for x in (weights, v, output, edited))
            shared_context = replace(context, call=(context.call, v.data_ptr(), v.shape))
            self._store.add("weights", WrittenOutCall(*tensors), output, shared_context)
        return edited

    def on_reorder(self, cache: object, rows: Tensor) -> None:
        """Reorder the recorded rows."""
        if self.on and isinstance(cache, KVCache):
            self._store.reorder(cache, rows)  # sub-caches are reordered too, but have no separate record

    def _context_of_scores(self, call: ObservedCall) -> CallContext | None:
        """Return the context of a call outside of all forward calls: that of the module with its score function."""
        path = self._paths.get(call.scores) if isinstance(call.scores, nn.Module) else None
        return None if path is None else CallContext(path.rpartition(".")[0], 0)

    # -- recording and interventions ---------------------------------------------------------------------------------

    def _on_output(self, module: nn.Module, args: Args, kwargs: Kwargs, output: object, context: CallContext) -> object:
        """Return the replacement for the output of a module, or None for no change."""
        before = output
        path = context.path
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

    def _on_attention(self, context: CallContext, call: ObservedCall, output: Tensor) -> Tensor:
        """Return the replacement for the output of an attention call."""
        if isinstance(self._modules[context.path], nn.MultiheadAttention):
            return output  # recorded as one call when the layer returns
        edited = self._intervene(output, context, of_heads=True)
        if self._is_recorded("weights", context):
            impl = call.impl if call.sdpa_arguments is None else None
            outputs = (require_concrete(output).detach(), require_concrete(edited).detach())
            call_record = AttentionCall(attention_inputs(call), impl, *outputs)
            # Without a cache, calls over the same keys within one call of the module belong to one run.
            shared_context = replace(
                context, call=(context.call, call_record.call.k.data_ptr(), call_record.call.k.shape)
            )
            self._store.add("weights", call_record, output, shared_context)
        return edited

    def _on_torch_layer(
        self, layer: nn.MultiheadAttention, arguments: Kwargs, output: Any, context: CallContext
    ) -> object:
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

    def _record(self, kind: str, value: object, context: CallContext) -> None:
        x = first_tensor(value) if self._is_recorded(kind, context) else None
        if x is not None:
            x = to_padded(require_concrete(x).detach())
            description = f"the recorded activation of {context.path or 'the model'}"
            self._store.add(kind, VersionedRef(description, x), x, context)

    def _is_recorded(self, kind: str, context: CallContext) -> bool:
        """Return whether this activation is requested and not part of the recomputation in a backward pass."""
        return context.path in self._recorded_paths[kind] and torch._C._current_graph_task_id() == -1


def _reject_compiled(modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError if a module is compiled, because compiled graphs call neither hooks nor wrappers."""
    for path, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            description = "is TorchScript"
            instead = "the module that it was made from"
        elif "_orig_mod" in module._modules:
            description = "is compiled"
            instead = "its `_orig_mod`, which has the same parameters"
        elif getattr(module, "_compiled_call_impl", None) is not None:
            description = "was compiled in place by .compile()"
            instead = "a copy that is not compiled"
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
def _takes_cache(forward: Callable[..., object]) -> bool:
    return "cache" in inspect.signature(forward).parameters


def require_concrete(x: Tensor) -> Tensor:
    """Return x, or raise ConfigError if its values will not exist later."""
    if not torch.compiler.is_compiling() and not is_concrete(x):
        raise ConfigError(
            "the model runs under torch.func or FakeTensorMode, whose tensors have no values later, so a trace cannot "
            "store them; call the model itself in the `with` block"
        )
    return x
