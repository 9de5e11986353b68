"""Watching a module run on nothing: tensors with sizes and without numbers go through the real code, forward and
backward, and every operator, every storage and its end are written into a log.

A storage is on the books from the operator that made it until nobody holds it, whoever that is: a variable of the
module's code, autograd, a parameter. So peaks are those of the real code, and nothing in here knows a model.
"""

from __future__ import annotations

import bisect
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead.costs.operators import Kernel, kernels_of, scratch_of, tensors_in
from clearhead.costs.ways import Look, Ways
from clearhead.errors import ClearheadError, ConfigError

__all__ = ["Log", "Step", "Storage", "blocks_of", "watch"]


@dataclass(slots=True)
class Step:
    """One operator that ran kernels: where (the module's path), in which phase, and what it asks of a machine."""

    name: str
    path: str
    phase: str  # "forward", "recompute", "backward"
    kernels: tuple[Kernel, ...]


@dataclass(slots=True)
class Storage:
    """Memory: its bytes, and the moments (counted in events) at which it was made and let go."""

    n_bytes: int
    path: str
    kind: str
    made_by: str
    born: int
    died: int | None = None


class Parameter(NamedTuple):
    """A parameter: the path of its module, its size, and its length along the first dimension."""

    path: str
    elements: int
    n_bytes: int
    rows: int


@dataclass
class Log:
    """All that was seen of one run."""

    steps: list[Step] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)  # by name
    blocks: list[str] = field(default_factory=list)  # paths of repeated layers
    looks: list[Look] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)  # operators whose operations are not known, and how often
    end_of_forward: int = 0
    end: int = 0
    moments: list[tuple[int, str]] = field(default_factory=list)  # (event, what ran)

    def alive(self, moment: int) -> Iterator[Storage]:
        return (s for s in self.storages if s.born <= moment and (s.died is None or s.died > moment))

    def peak(self) -> int:
        """The moment at which most bytes are alive."""
        return max(self._balance(lambda _: True), key=lambda pair: (pair[1], -pair[0]))[0]

    def peak_of(self, wanted: Callable[[Storage], bool]) -> int:
        """The most bytes of some storages that are alive together."""
        return max(n for _, n in self._balance(wanted))

    def _balance(self, wanted: Callable[[Storage], bool]) -> Iterator[tuple[int, int]]:
        changes = [0] * (self.end + 2)
        for storage in filter(wanted, self.storages):
            changes[storage.born] += storage.n_bytes
            if storage.died is not None:
                changes[storage.died] -= storage.n_bytes
        return enumerate(itertools.accumulate(changes))

    def when(self, moment: int) -> str:
        """What ran at a moment, in words."""
        at = bisect.bisect_right(self.moments, (moment, "\uffff")) - 1
        return self.moments[at][1] if at >= 0 else "before"


class _Watch(TorchDispatchMode):
    """Writes the log. Below it the tensors have no numbers; above it runs the module's own code."""

    def __init__(self, plans: Callable[[], dict[int, int]], *, gpu: bool) -> None:
        super().__init__()
        self.log = Log()
        self.phase = "forward"
        self.inside = "the module"
        self.running: list[str] = []
        self.events = 0
        self._gpu, self._plans = gpu, plans
        self._known: dict[int, Storage] = {}
        self._numbers: list[int] = []  # autograd's numbers of operators, and the paths they ran at
        self._paths_at: list[str] = []
        self._owners: dict[int, str] = {}

    # ------------------------------------------------------------------ where

    def path(self) -> str:
        if self.running:
            return self.running[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return "loss"
        owner = getattr(node, "variable", None)
        if owner is not None:
            return self._owners.get(id(owner), "loss")
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._paths_at[at] if at >= 0 else "loss"

    def _note_number(self, path: str) -> None:
        number = torch._C._autograd._get_sequence_nr() - 1  # of the node that waits for this operator's gradient
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._paths_at.append(path)

    # ------------------------------------------------------------------ what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        path = self.inside = self.path()
        out = func(*args, **kwargs)
        phase = self.phase if self.phase == "forward" or not self.running else "recompute"
        if phase != "backward":
            self._note_number(path)
        kernels, known = kernels_of(func, args, kwargs, out, backward=phase == "backward", plans=self._plans())
        name = func._schema.name.removeprefix("aten::")
        if not known:
            self.log.unknown[name] = self.log.unknown.get(name, 0) + 1
        if kernels:
            self.log.steps.append(Step(name, path, phase, kernels))
            self.log.moments.append((self.events + 1, f"{phase}, {path}: {name}"))
        for tensor in tensors_in(out):
            self.saw(tensor, path, "passing", name)
        scratch = scratch_of(func, args) if self._gpu else 0
        if scratch:
            self.events += 1
            self.log.storages.append(Storage(scratch, path, "workspace", name, self.events, self.events + 1))
            self.events += 1
        return out

    def saw(self, tensor: Tensor, path: str, kind: str, made_by: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self.events += 1
        book = self._known[key] = Storage(storage.nbytes(), path, kind, made_by, self.events)
        self.log.storages.append(book)
        weakref.finalize(storage, self._gone, key, book)

    def _gone(self, key: int, book: Storage) -> None:
        if self._known.get(key) is book:
            del self._known[key]
            self.events += 1
            book.died = self.events

    def mark(self, tensor: Tensor | None, kind: str) -> None:
        if tensor is not None and tensor.untyped_storage()._cdata in self._known:
            self._known[tensor.untyped_storage()._cdata].kind = kind

    # ------------------------------------------------------------------ the model

    def _left(self, *_: Any) -> None:
        self.running.pop()

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Knows, at any time, which module is running, and what was there before it ran."""
        for name, parameter in model.named_parameters():
            path = name.rpartition(".")[0] or type(model).__name__
            self._owners[id(parameter)] = path
            rows = parameter.shape[0] if parameter.dim() else 1
            self.log.parameters[name] = Parameter(path, parameter.numel(), parameter.numel() * parameter.element_size(), rows)
            self.saw(parameter, path, "weights", "parameter")
        for name, buffer in model.named_buffers():
            self.saw(buffer, name.rpartition(".")[0], "buffers", "buffer")
        with ExitStack() as stack:
            for path, module in model.named_modules():
                label = path or type(model).__name__
                before = module.register_forward_pre_hook(lambda *_, label=label: self.running.append(label), prepend=True)
                after = module.register_forward_hook(self._left, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield


def blocks_of(model: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """The repeated layers by their path: what stands in the outermost lists of modules of one kind."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        layers = dict(child.named_children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and len({type(x) for x in layers.values()}) == 1
        place = f"{path}{name}."
        found |= {f"{place}{n}": layer for n, layer in layers.items()} if is_list else blocks_of(child, place)
    return found


@contextmanager
def _recomputing(model: nn.Module, again: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Every block keeps what it is given alone, and runs again on the way back, `again` around it."""
    blocks = list(blocks_of(model).values())
    if not blocks:
        raise ConfigError(f"recompute='blocks' needs repeated layers in a list, and {type(model).__name__} has none")
    how = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    plain = [block.forward for block in blocks]

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with again():
            return forward(*args, **kwargs)

    for block, forward in zip(blocks, plain, strict=True):
        block.forward = partial(checkpoint, partial(run, forward), **how)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def watch(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor],
    inputs: list[Tensor],
    *,
    training: bool,
    device: str,
    recompute: bool = False,
    probe: Log | None = None,
) -> Log:
    """The log of one forward pass without gradients, or of forward (to the loss that `run` gives) and backward.

    To be called inside a `FakeTensorMode`, with a model and inputs that were made in it. `probe` is the log of the
    same module at other sizes, whose plans are then followed."""
    ways: Ways
    watcher = _Watch(lambda: ways.plans, gpu=device == "cuda")
    ways = Ways(device, watcher.path, None if probe is None else probe.looks)
    log = watcher.log
    log.blocks = list(blocks_of(model))
    for tensor in inputs:
        watcher.saw(tensor, "", "inputs", "input")
    with ExitStack() as stack:
        # Recurrent layers step by step: the CPU's own operator for them tells nothing of what it does.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        stack.enter_context(watcher.following(model))
        if recompute and training:
            again = lambda: ways if watcher.phase == "backward" else nullcontext()  # noqa: E731
            stack.enter_context(_recomputing(model, again))
        stack.enter_context(ways.standing_in(model.modules()))
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(_in_words(watcher))
        stack.enter_context(ways)
        stack.enter_context(watcher)
        out = run(model)
        log.end_of_forward = watcher.events
        log.looks = list(ways.looks)
        watcher.mark(out if training else None, "loss")
        if training:
            watcher.phase = "backward"
            torch.autograd.backward(out)  # not out.backward(), during which no stand-in would stand
            for parameter in model.parameters():
                watcher.mark(parameter.grad, "gradients")
        log.end = watcher.events
    for storage in log.storages:
        if storage.died is not None and storage.died > log.end:
            storage.died = None
        alive = storage.born <= log.end_of_forward and (storage.died is None or storage.died > log.end_of_forward)
        if training and storage.kind == "passing" and alive:
            storage.kind = "activations"
    _add_in_place(log)
    return log


def _add_in_place(log: Log) -> None:
    """Two gradients of one tensor are added in place where nobody else holds the first; a watched run makes a third."""
    by_birth = {storage.born: storage for storage in log.storages}
    by_death = {storage.died: storage for storage in log.storages if storage.died is not None}
    for moment, what in log.moments:
        if not what.startswith("backward") or not what.endswith(": add"):
            continue
        made, gone = by_birth.get(moment), by_death.get(moment + 1)
        if made is not None and gone is not None and gone.n_bytes == made.n_bytes and gone.born < moment:
            made.born, gone.died = moment + 1, moment


@contextmanager
def _in_words(watcher: _Watch) -> Iterator[None]:
    """What cannot be known without numbers, with the operator and the line that asked; what the module refuses."""
    try:
        yield
    except ClearheadError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        operator = getattr(error, "func", "a comparison of sizes")
        raise ConfigError(
            f"what {watcher.inside} does depends on numbers that a run on nothing does not have: {operator}, at "
            f"{_line(error)}; give the module a way that does not look at its data"
        ) from error
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        raise ConfigError(f"{watcher.inside} cannot run so: {str(error).splitlines()[0]} (at {_line(error)})") from error


def _line(error: BaseException) -> str:
    """The last line of the caller's code on the way to an error: not torch's and not this package's."""
    ours, torchs = (str(Path(place).parent) for place in (clearhead.__file__, torch.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([f for f in frames if not f.filename.startswith((ours, torchs))] or frames)[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"
