"""Watching a module run on nothing: tensors with sizes and without numbers go through the real code, forward and
backward, and every operator, every storage and its end are written into a log.

A storage is on the books from the operator that made it until nobody holds it, whoever that is: a variable of the
module's code, autograd, a parameter. So peaks are those of the real code, and nothing in here knows a model."""

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

from clearhead.costs.operators import Call, Kernel, kernels_of, scratch_of
from clearhead.costs.ways import Look, Ways
from clearhead.errors import ClearheadError, ConfigError


class Step(NamedTuple):
    """One operator that ran kernels: where (the module's path), in which phase, what it asks of a machine, and when."""

    name: str
    path: str
    phase: str  # "forward", "recompute", "backward"
    kernels: tuple[Kernel, ...]
    moment: int  # counted in events, as storages are


class Parameter(NamedTuple):
    """A parameter: the path of its module, its size, and its length along the first dimension."""

    path: str
    elements: int
    n_bytes: int
    rows: int


@dataclass(slots=True)
class Storage:
    """Memory: its bytes, and the moments (counted in events) at which it was made and let go."""

    n_bytes: int
    path: str
    kind: str
    made_by: str
    born: int
    died: int | None = None

    def lives(self, moment: int) -> bool:
        return self.born <= moment and (self.died is None or self.died > moment)


@dataclass
class Log:
    """All that was seen of one run."""

    steps: list[Step] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)  # by name
    blocks: list[str] = field(default_factory=list)  # paths of repeated layers
    looks: list[Look] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)  # operators whose operations are not known, and how often
    end: int = 0

    def peak(self) -> int:
        """The moment at which most bytes are alive."""
        alive = self._alive(self.end)
        return alive.index(max(alive))

    def peak_of(self, kinds: tuple[str, ...] = (), *, since: int = 0, until: int | None = None) -> int:
        """The most bytes that are alive together, but for storages of some kinds."""
        return max(self._alive(self.end if until is None else until, kinds)[since:])

    def _alive(self, end: int, but: tuple[str, ...] = ()) -> list[int]:
        """Bytes at each moment."""
        changes = [0] * (end + 2)
        for storage in self.storages:
            if storage.kind not in but:
                changes[min(storage.born, end + 1)] += storage.n_bytes
                changes[end + 1 if storage.died is None else min(storage.died, end + 1)] -= storage.n_bytes
        return list(itertools.accumulate(changes[: end + 1]))

    def shape(self) -> tuple[Any, ...]:
        """What two runs of one module at different sizes have in common."""
        return self.end, [step.name for step in self.steps], [storage.made_by for storage in self.storages]

    def when(self, moment: int) -> str:
        """What ran at a moment, in words."""
        at = bisect.bisect_right(self.steps, moment, key=lambda step: step.moment) - 1
        return "{0.phase}, {0.path}: {0.name}".format(self.steps[at]) if at >= 0 else "before"


class Watch(TorchDispatchMode):
    """Writes the log. `plans` are the pairs that each plan of gathered attention computes; a `gpu` needs scratch."""

    def __init__(self, *, gpu: bool = False) -> None:
        super().__init__()
        self.log, self.phase, self.inside, self.events = Log(), "forward", "the module", 0
        self.plans: dict[int, int] = {}
        self.running: list[str] = []
        self._gpu = gpu
        self._known: dict[int, Storage] = {}
        self._numbers: list[int] = []  # autograd's numbers of operators, and the paths they ran at
        self._paths: list[str] = []
        self._owners: dict[int, str] = {}

    def path(self) -> str:
        """The module that runs, or whose gradients are computed."""
        if self.running:
            return self.running[-1]
        node = torch._C._current_autograd_node()
        owner = getattr(node, "variable", None)
        if node is None or owner is not None:
            return self._owners.get(id(owner), "loss")
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._paths[at] if at >= 0 else "loss"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        path = self.inside = self.path()
        out = func(*args, **kwargs)
        phase = self.phase if self.phase == "forward" or not self.running else "recompute"
        number = torch._C._autograd._get_sequence_nr() - 1  # of the node that waits for this operator's gradient
        if phase != "backward" and (not self._numbers or number > self._numbers[-1]):
            self._numbers.append(number)
            self._paths.append(path)
        call = Call(func, args, kwargs, out, phase == "backward", self.plans)
        kernels, known = kernels_of(call)
        if not known:
            self.log.unknown[call.name] = self.log.unknown.get(call.name, 0) + 1
        if kernels:
            self.log.steps.append(Step(call.name, path, phase, kernels, self.events + 1))
        for tensor in (*call.outputs, *call.inputs):
            self.saw(tensor, path, "passing", call.name)
        if self._gpu and (scratch := scratch_of(call)):
            self.log.storages.append(Storage(scratch, path, "workspace", call.name, self.events + 1, self.events + 2))
            self.events += 2
        return out

    def saw(self, tensor: Tensor, path: str = "", kind: str = "passing", made_by: str = "") -> None:
        """Puts a storage on the books, if it is not there yet."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self.events += 1
            book = self._known[storage._cdata] = Storage(storage.nbytes(), path, kind, made_by, self.events)
            self.log.storages.append(book)
            weakref.finalize(storage, self._gone, storage._cdata, book)

    def _gone(self, key: int, book: Storage) -> None:
        if self._known.get(key) is book:
            del self._known[key]
            self.events += 1
            book.died = self.events

    def mark(self, tensor: Tensor | None, kind: str) -> None:
        if tensor is not None and (book := self._known.get(tensor.untyped_storage()._cdata)):
            book.kind = kind

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Knows, at any time, which module is running, and what was there before it ran."""
        root = type(model).__name__
        for name, x in model.named_parameters():
            path = name.rpartition(".")[0] or root
            self._owners[id(x)] = path
            rows = x.shape[0] if x.dim() else 1
            self.log.parameters[name] = Parameter(path, x.numel(), x.numel() * x.element_size(), rows)
            self.saw(x, path, "weights", "parameter")
        for name, buffer in model.named_buffers():
            self.saw(buffer, name.rpartition(".")[0], "buffers", "buffer")
        self.log.blocks = list(blocks_of(model))
        with ExitStack() as stack:
            for path, module in model.named_modules():
                enter: Any = lambda *_, path=path or root: self.running.append(path)  # noqa: E731
                leave: Any = lambda *_: self.running.pop() and None  # noqa: E731
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield


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
    watcher = Watch(gpu=device == "cuda")
    ways = Ways(device, watcher.path, watcher.plans, None if probe is None else probe.looks)
    log = watcher.log
    for tensor in inputs:
        watcher.saw(tensor, "", "inputs", "input")
    with ExitStack() as stack:
        # Recurrent layers step by step: the CPU's own operator for them tells nothing of what it does.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        stack.enter_context(watcher.following(model))
        if recompute and training:
            stack.enter_context(_recomputing(model, lambda: ways if watcher.phase == "backward" else nullcontext()))
        stack.enter_context(ways.standing_in(model.modules()))
        for context in (torch.set_grad_enabled(training), _in_words(watcher), ways, watcher):
            stack.enter_context(context)
        out = run(model)
        middle, log.looks = watcher.events, list(ways.looks)
        if training:
            watcher.mark(out, "loss")
            watcher.phase = "backward"
            torch.autograd.backward(out)
            for parameter in model.parameters():
                watcher.mark(parameter.grad, "gradients")
        log.end = watcher.events
    for storage in log.storages:
        if storage.died is not None and storage.died > log.end:
            storage.died = None
        if training and storage.kind == "passing" and storage.lives(middle):
            storage.kind = "activations"
    _add_in_place(log)
    return log


def _add_in_place(log: Log) -> None:
    """Two gradients of one tensor are added in place where nobody else holds the first; a watched run makes a third."""
    by_birth = {storage.born: storage for storage in log.storages}
    by_death = {storage.died: storage for storage in log.storages if storage.died is not None}
    for moment in (step.moment for step in log.steps if (step.phase, step.name) == ("backward", "add")):
        made, gone = by_birth.get(moment), by_death.get(moment + 1)
        if made and gone and gone.n_bytes == made.n_bytes and gone.born < moment:
            made.born, gone.died = moment + 1, moment


# ---------------------------------------------------------------------- blocks that run again


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
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with again():
            return forward(*args, **kwargs)

    for block in blocks:
        block.forward = partial(checkpoint, partial(run, block.forward), **how)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


# ---------------------------------------------------------------------- what cannot be watched


@contextmanager
def _in_words(watcher: Watch) -> Iterator[None]:
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
    except (RuntimeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{watcher.inside} cannot run so: {str(error).splitlines()[0]} (at {_line(error)})"
        ) from error


def _line(error: BaseException) -> str:
    """The last line of the caller's code on the way to an error: not torch's and not this package's."""
    ours, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((ours, torchs))]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "a line of torch's own"
