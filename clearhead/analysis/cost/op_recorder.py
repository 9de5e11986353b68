"""Record one execution of a module on fake tensors: every operator, and the lifetime of every storage.

Fake tensors have sizes and no data. They run through the real code of the module, forward and backward. A storage is
recorded from the operator that creates it until its last reference is dropped, whether a local variable, autograd or a
parameter holds it. Peaks are therefore those of the real code, and nothing here depends on the kind of model."""

from __future__ import annotations

import bisect
import itertools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from clearhead._core.call_types import Args, Kwargs, Operator
from clearhead._core.json_types import JSONObject
from clearhead.analysis.cost.dispatch import AttentionRecord, DeviceDispatch
from clearhead.analysis.cost.operators import KernelCost, OpCall, kernels_of, scratch_of
from clearhead.analysis.inputs.module_calls import observing_modules
from clearhead.analysis.inputs.module_errors import error_summary, source_line
from clearhead.errors import ClearheadError, ConfigError
from clearhead.training.step_runner import MethodReplacement, replace_methods


class OpRecord(NamedTuple):
    """One operator that ran kernels: its module path, phase, kernels and time."""

    name: str
    path: str
    phase: str  # "forward", "recompute", "backward"
    kernels: tuple[KernelCost, ...]
    time: int  # event number, as in `StorageRecord`


class ParameterRecord(NamedTuple):
    """A parameter: path of its module, number of elements, bytes, and size of its first dimension."""

    path: str
    n_elements: int
    n_bytes: int
    rows: int


@dataclass(slots=True)
class StorageRecord:
    """Memory: bytes, and the event numbers of its allocation and release."""

    n_bytes: int
    path: str
    kind: str
    op: str
    allocated: int
    freed: int | None = None

    def is_live(self, time: int) -> bool:
        """Return whether the storage is allocated at this time."""
        return self.allocated <= time and (self.freed is None or self.freed > time)


@cache
def normalize_path(path: str) -> str:
    """Return a module path with layer numbers replaced: blocks.*.attention."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


class TermKey(NamedTuple):
    """Quantity of a term ("flops" or "bytes" of kernels, "parameters" or "saved" bytes), its phase, and its part."""

    quantity: str
    phase: str
    part: str


@dataclass
class ExecutionLog:
    """Everything recorded in one execution."""

    ops: list[OpRecord] = field(default_factory=list)
    storages: list[StorageRecord] = field(default_factory=list)
    parameters: dict[str, ParameterRecord] = field(default_factory=dict)  # by name
    blocks: list[str] = field(default_factory=list)  # paths of repeated layers
    attention: list[AttentionRecord] = field(default_factory=list)
    unknown_ops: dict[str, int] = field(default_factory=dict)  # operators of unknown FLOPs, and their calls
    end: int = 0

    @cached_property
    def terms(self) -> dict[TermKey, list[tuple[str, int]]]:
        """The terms of all sums, each with the path of its module, grouped once by quantity, phase and part."""
        groups: dict[TermKey, list[tuple[str, int]]] = {}

        def add(quantity: str, phase: str, path: str, terms: Iterable[int]) -> None:
            group = groups.setdefault(TermKey(quantity, phase, normalize_path(path)), [])
            group.extend((path, n) for n in terms)

        for record in self.ops:
            for kernel in record.kernels:
                add("flops", record.phase, record.path, kernel.flop_terms)
                add("bytes", record.phase, record.path, kernel.byte_terms)
        for parameter in self.parameters.values():
            add("parameters", "", parameter.path, (parameter.n_elements,))
        for storage in self.storages:
            if storage.kind == "activations":
                add("saved", "", storage.path, (storage.n_bytes,))
        return groups

    @cached_property
    def launches(self) -> Counter[str]:
        """The number of kernels of each part, in the order of execution."""
        launches: Counter[str] = Counter()
        for record in self.ops:
            launches[normalize_path(record.path)] += len(record.kernels)
        return launches

    def __getstate__(self) -> JSONObject:
        """Return the fields without the groups, which are computed again."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def peak_time(self) -> int:
        """Return the time at which most bytes are allocated."""
        live = self._live_bytes(self.end)
        return live.index(max(live))

    def peak_bytes(self, exclude: tuple[str, ...] = (), *, since: int = 0, until: int | None = None) -> int:
        """Return the most bytes allocated at once, without storages of the kinds in `exclude`."""
        return max(self._live_bytes(self.end if until is None else until, exclude)[since:])

    def _live_bytes(self, end: int, exclude: tuple[str, ...] = ()) -> list[int]:
        """Return the allocated bytes at each time."""
        changes = [0] * (end + 2)
        for storage in self.storages:
            if storage.kind not in exclude:
                changes[min(storage.allocated, end + 1)] += storage.n_bytes
                changes[end + 1 if storage.freed is None else min(storage.freed, end + 1)] -= storage.n_bytes
        return list(itertools.accumulate(changes[: end + 1]))

    def signature(self) -> tuple[object, ...]:
        """Return a value that is equal for two executions of one module at different sizes."""
        return self.end, [record.name for record in self.ops], [storage.op for storage in self.storages]

    def describe(self, time: int) -> str:
        """Return phase, module path and operator at this time."""
        index = bisect.bisect_right(self.ops, time, key=lambda record: record.time) - 1
        return "{0.phase}, {0.path}: {0.name}".format(self.ops[index]) if index >= 0 else "before"


class OpRecorder(TorchDispatchMode):
    """Records all operators and storages while it is active.

    Args:
        is_gpu: Whether kernels need the workspace that they need on a GPU.
    """

    def __init__(self, *, is_gpu: bool = False) -> None:
        super().__init__()
        self.log = ExecutionLog()
        self.phase = "forward"
        self.current_path = "the module"
        self.events = 0
        self.plans: dict[int, int] = {}  # pairs per head that each sparse-attention plan computes
        self.module_stack: list[str] = []
        self._is_gpu = is_gpu
        self._live: dict[int, StorageRecord] = {}
        self._sequence_numbers: list[int] = []  # of autograd nodes, with the paths that created them
        self._sequence_paths: list[str] = []
        self._parameter_paths: dict[int, str] = {}

    def path(self) -> str:
        """Return the path of the module that runs, or whose gradients are computed."""
        if self.module_stack:
            return self.module_stack[-1]
        node = torch._C._current_autograd_node()
        parameter = getattr(node, "variable", None)
        if node is None or parameter is not None:
            return self._parameter_paths.get(id(parameter), "loss")
        index = bisect.bisect_right(self._sequence_numbers, node._sequence_nr()) - 1
        return self._sequence_paths[index] if index >= 0 else "loss"

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        path = self.path()
        self.current_path = path
        out = func(*args, **kwargs)
        phase = self.phase if self.phase == "forward" or not self.module_stack else "recompute"
        number = torch._C._autograd._get_sequence_nr() - 1  # of the node that will compute this operator's gradient
        if phase != "backward" and (not self._sequence_numbers or number > self._sequence_numbers[-1]):
            self._sequence_numbers.append(number)
            self._sequence_paths.append(path)
        call = OpCall(func, args, kwargs, out, phase == "backward", self.plans)
        kernels, has_all_flops = kernels_of(call)
        if not has_all_flops:
            self.log.unknown_ops[call.name] = self.log.unknown_ops.get(call.name, 0) + 1
        if kernels:
            self.log.ops.append(OpRecord(call.name, path, phase, kernels, self.events + 1))
        for tensor in (*call.outputs, *call.inputs):
            self.track(tensor, path, "temporaries", call.name)
        if self._is_gpu and (scratch := scratch_of(call)):
            record = StorageRecord(scratch, path, "workspace", call.name, self.events + 1, self.events + 2)
            self.log.storages.append(record)
            self.events += 2
        return out

    def track(self, tensor: Tensor, path: str = "", kind: str = "temporaries", op: str = "") -> None:
        """Record the storage of a tensor, unless it is recorded already."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self.events += 1
            record = StorageRecord(storage.nbytes(), path, kind, op, self.events)
            self._live[storage._cdata] = record
            self.log.storages.append(record)
            weakref.finalize(storage, self._on_free, storage._cdata, record)

    def _on_free(self, key: int, record: StorageRecord) -> None:
        if self._live.get(key) is record:
            del self._live[key]
            self.events += 1
            record.freed = self.events

    def set_kind(self, tensor: Tensor | None, kind: str) -> None:
        """Set the kind of the storage of a tensor."""
        if tensor is not None and (record := self._live.get(tensor.untyped_storage()._cdata)):
            record.kind = kind

    @contextmanager
    def tracking_modules(self, model: nn.Module) -> Iterator[None]:
        """Maintain the stack of running modules, and record parameters and buffers first."""
        root = type(model).__name__
        for name, x in model.named_parameters():
            path = name.rpartition(".")[0] or root
            self._parameter_paths[id(x)] = path
            rows = x.shape[0] if x.dim() else 1
            self.log.parameters[name] = ParameterRecord(path, x.numel(), x.numel() * x.element_size(), rows)
            self.track(x, path, "parameters", "parameter")
        for name, buffer in model.named_buffers():
            self.track(buffer, name.rpartition(".")[0], "buffers", "buffer")
        self.log.blocks = list(repeated_layers(model))

        def push(path: str, *_: object) -> None:
            self.module_stack.append(path or root)

        def pop(*_: object) -> None:
            self.module_stack.pop()

        with observing_modules(model, push, pop):
            yield


def record_execution(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor],
    inputs: list[Tensor],
    *,
    training: bool,
    device: str,
    recompute: bool = False,
    reference: ExecutionLog | None = None,
) -> ExecutionLog:
    """Record a forward pass without gradients, or forward (to the loss that `run` returns) and backward.

    Must be called inside a `FakeTensorMode` with a model and inputs created in it. `reference` is the log of the same
    module at other sizes; its sparse-attention plans are then used."""
    recorder = OpRecorder(is_gpu=device == "cuda")
    dispatch = DeviceDispatch(device, recorder.path, recorder.plans, None if reference is None else reference.attention)
    log = recorder.log
    for tensor in inputs:
        recorder.track(tensor, "", "inputs", "input")
    with ExitStack() as stack:
        # Recurrent layers run step by step: the CPU's fused operator does not reveal its work.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        stack.enter_context(recorder.tracking_modules(model))
        if recompute and training:
            in_backward = lambda: dispatch if recorder.phase == "backward" else nullcontext()  # noqa: E731
            stack.enter_context(_checkpointing(model, in_backward))
        stack.enter_context(dispatch.observing())
        for context in (torch.set_grad_enabled(training), _readable_errors(recorder), dispatch, recorder):
            stack.enter_context(context)
        out = run(model)
        forward_end = recorder.events
        log.attention = list(dispatch.records)
        if training:
            recorder.set_kind(out, "loss")
            recorder.phase = "backward"
            torch.autograd.backward(out)
            for parameter in model.parameters():
                recorder.set_kind(parameter.grad, "gradients")
        log.end = recorder.events
    for storage in log.storages:
        if storage.freed is not None and storage.freed > log.end:
            storage.freed = None
        if training and storage.kind == "temporaries" and storage.is_live(forward_end):
            storage.kind = "activations"
    _accumulate_in_place(log)
    return log


def _accumulate_in_place(log: ExecutionLog) -> None:
    """Reuse the first of two added gradients for the sum, as autograd does if it holds the only reference."""
    allocated = {storage.allocated: storage for storage in log.storages}
    freed = {storage.freed: storage for storage in log.storages if storage.freed is not None}
    for time in (record.time for record in log.ops if (record.phase, record.name) == ("backward", "add")):
        total = allocated.get(time)
        operand = freed.get(time + 1)
        if total and operand and operand.n_bytes == total.n_bytes and operand.allocated < time:
            total.allocated = time + 1
            operand.freed = time


# ---------------------------------------------------------------------- activation checkpointing


def repeated_layers(model: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """Return the repeated layers by path: the items of the outermost lists of modules of one type."""
    blocks: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        layers = dict(child.named_children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and len({type(x) for x in layers.values()}) == 1
        prefix = f"{path}{name}."
        blocks |= {f"{prefix}{n}": layer for n, layer in layers.items()} if is_list else repeated_layers(child, prefix)
    return blocks


@contextmanager
def _checkpointing(model: nn.Module, recompute_context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Checkpoint every block: only its input is saved, and it runs again in backward inside `recompute_context`."""
    blocks = list(repeated_layers(model).values())
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing needs repeated layers in a list, and {type(model).__name__} has none"
        )

    def run(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        with recompute_context():
            return forward(*args, **kwargs)

    def recomputed(block: nn.Module) -> MethodReplacement:
        forward = partial(
            checkpoint,
            partial(run, block.forward),
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )
        return MethodReplacement(block, "forward", forward)

    with replace_methods(map(recomputed, blocks)):
        yield


# ---------------------------------------------------------------------- modules that cannot run on fake tensors


@contextmanager
def _readable_errors(recorder: OpRecorder) -> Iterator[None]:
    """Convert errors of the module to a ConfigError with the operator and the line."""
    try:
        yield
    except ClearheadError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        operator = getattr(error, "func", "a comparison of sizes")
        raise ConfigError(
            f"{recorder.current_path} depends on tensor values, and cost runs it on tensors without data: {operator}, "
            f"at {source_line(error) or 'a line inside torch'}; avoid the data-dependent branch"
        ) from error
    except Exception as error:
        location = source_line(error) or "a line inside torch"
        raise ConfigError(
            f"{recorder.current_path} failed with these inputs: {error_summary(error)} (at {location})"
        ) from error
