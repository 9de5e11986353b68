"""The residual stream of one run, found by watching: which modules add to it, and how the logits are read off it.

While the model runs, every operation is noted whose result depends on the input. From the logits the notes are then
followed back through whatever is linear: sums, moves of data, constant factors, the matrix that makes logits. What a
norm divides by is one number a position; it is taken as it came out of the run, and a norm so frozen is linear too.
Where the way back ends, something was added: what a head, a feed-forward layer or an embedding wrote. So

    logit = Σ over these parts of (gradient at the part) · (what the part wrote)

and nothing is left over but rounding. No model and no norm is known by name here; how a layer is called is read off the
module that returned it."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.look.listen import first_tensor
from clearhead.look.question import Given, ask, tensors_of

__all__ = ["Leaf", "Stream", "watched"]

_LINEAR = frozenset(
    "add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __isub__ __rsub__ subtract neg __neg__ mean sum cat concat "
    "concatenate stack view reshape flatten unflatten transpose swapaxes permute movedim t squeeze unsqueeze expand "
    "expand_as repeat contiguous clone detach alias __getitem__ select narrow index_select gather chunk split unbind "
    "dropout roll flip".split()
)
_CASTS = frozenset("to float double half bfloat16 type type_as".split())
_PRODUCTS = frozenset("mul mul_ __mul__ __rmul__ __imul__ multiply".split())
_QUOTIENTS = frozenset("div div_ __truediv__ __itruediv__ true_divide divide".split())
_IN_PLACE = frozenset("__iadd__ __isub__ __imul__ __itruediv__ __ipow__ __setitem__".split())
_NORMS = {"layer_norm": True, "rms_norm": False}  # whether the mean is taken off
_READS = frozenset("linear addmm matmul __matmul__ mm".split())  # what makes logits of the stream


@dataclass(frozen=True, eq=False)
class Step:
    """One operation: how it can be done again, the module that ran it, and which of its results is meant."""

    number: int
    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: str
    index: int | None

    @property
    def tensors(self) -> list[Tensor]:
        found = {id(x): x for x in tree_flatten((self.args, self.kwargs))[0] if _is_float(x)}
        return list(found.values())

    @property
    def product(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of a matrix product: x, the matrix by which it is multiplied from the right, and what is added."""
        if self.name == "addmm":
            bias, x, matrix = self.args[:3]
            return x, matrix, bias
        if self.name == "linear":
            given = dict(zip(("input", "weight", "bias"), self.args, strict=False)) | self.kwargs
            return given["input"], given["weight"].mT, given.get("bias")
        return self.args[0], self.args[1], None

    @property
    def norm(self) -> tuple[Tensor, Tensor | None, float, Tensor | None]:
        """Of torch's layer_norm or rms_norm: x, weight, eps and bias."""
        names = ("input", "normalized_shape", "weight", *(("bias",) if _NORMS[self.name] else ()), "eps")
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        x, eps = given["input"], given.get("eps")
        usual = 1e-5 if _NORMS[self.name] else torch.finfo(x.dtype).eps
        return x, given.get("weight"), usual if eps is None else eps, given.get("bias")


@dataclass(frozen=True, eq=False)
class Leaf:
    """Something that was added: what it is called, what it wrote, and the logit's gradient there."""

    path: str
    value: Tensor
    gradient: Tensor  # float64
    step: Step | None  # None: a constant, such as a bias or a table of positions

    @property
    def shares(self) -> Tensor:
        return self.gradient * self.value.detach().double()


class Notes(TorchFunctionMode):
    """Every operation of one thread whose result depends on the tensors that were given."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.steps: Any = WeakTensorKeyDictionary()  # Tensor → Step; a result that nobody needs is forgotten
        self.names: Any = WeakTensorKeyDictionary()  # Tensor → the path of the outermost module that returned it
        self.running: list[str] = []
        self._count = itertools.count(1)
        for x in given:
            self.steps[x] = Step(0, "input", None, (), {}, "", None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = args
        if args and isinstance(args[0], Tensor) and (name in _IN_PLACE or name.endswith("_") and name[-2] != "_"):
            # Written over: what was there goes on as a tensor of its own.
            before = args[0].detach().clone()
            for notes in (self.steps, self.names):
                if args[0] in notes:
                    notes[before] = notes.pop(args[0])
            given = (before, *args[1:])
        out = func(*args, **kwargs)
        made = args[0] if name == "__setitem__" else out
        flat = tree_flatten((given, kwargs))[0]
        if not any(isinstance(x, Tensor) and x in self.steps for x in flat):
            return out
        path, kept = self.running[-1] if self.running else "", name in _FOLLOWED
        several = isinstance(made, (tuple, list))
        for index, one in enumerate(made if several else [made]):
            if isinstance(one, Tensor) and not any(one is x for x in flat):  # a dropout at rest returns what it is given
                what = (func, given, kwargs) if kept else (None, (), {})
                self.steps[one] = Step(next(self._count), name, *what, path, index if several else None)
        return out

    @property
    def now(self) -> int:
        return next(self._count)


_FOLLOWED = _LINEAR | _CASTS | _PRODUCTS | _QUOTIENTS | _NORMS.keys() | _READS


@dataclass(frozen=True, eq=False)
class Ran:
    """One call of a member of an nn.ModuleList or nn.Sequential: what came in, what it returned, and when it had."""

    entered: Tensor | None
    output: Any
    number: int


class Stream:
    """One run of a model, with the way from its logits back to everything that was added up for them."""

    def __init__(self, model: nn.Module, notes: Notes, logits: Tensor, ran: Mapping[str, Ran]) -> None:
        self.model, self.logits = model, logits
        self._notes = notes
        self._parameters = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        on_the_way = {id(x) for x, _, reading in self._back() if not reading or self._begins(x)}
        self.ran = ran  # by path, in the order in which they had run
        self.blocks: list[str] = []
        for path, one in ran.items():
            left = first_tensor(one.output)
            inner = any(path.startswith(f"{block}.") for block in ran if block != path and self._is_block(block))
            if left is not None and id(left) in on_the_way and self._is_block(path) and not inner:
                self.blocks.append(path)

    def leaves(self, gradient: Tensor) -> list[Leaf]:
        """What was added up, with the gradient of `(gradient · logits).sum()` at each."""
        return [leaf for leaf in self._walk(gradient.double()) if leaf is not None]

    def _is_block(self, path: str) -> bool:
        return any(True for _ in self.model.get_submodule(path).children())

    def _begins(self, x: Tensor) -> bool:
        """Whether the stream begins at this tensor, on the way back from the logits: a sum or a norm made it."""
        step = self._notes.steps.get(x)
        return step is not None and (step.name in _NORMS or "add" in step.name)

    def _back(self) -> Iterator[tuple[Tensor, Step, bool]]:
        """The tensors on the way back that something else was added to, without their gradients."""
        seen: set[int] = set()
        waiting = [(self.logits, True)]
        while waiting:
            x, reading = waiting.pop()
            step = self._notes.steps.get(x)
            sources = None if step is None else self._sources(step, reading)
            if step is None or sources is None or id(x) in seen:
                continue
            seen.add(id(x))
            yield x, step, reading
            waiting += [(source, reading and not self._begins(x)) for source in sources]

    def _walk(self, gradient: Tensor) -> Iterator[Leaf | None]:
        """Latest result first, so that each is met once and with its whole gradient."""
        found: dict[int, tuple[Tensor, Tensor, str, bool]] = {}
        queue: list[tuple[int, int]] = []
        notes = self._notes

        def push(x: Tensor, g: Tensor, path: str, reading: bool) -> None:
            own = notes.names.get(x)
            if id(x) in found:
                g = found[id(x)][1] + g
            else:
                step = notes.steps.get(x)
                heapq.heappush(queue, (0 if step is None else -step.number, id(x)))
            found[id(x)] = (x, g, own or path, reading)

        push(self.logits, gradient, "", True)
        while queue:
            x, g, path, reading = found.pop(heapq.heappop(queue)[1])
            step = notes.steps.get(x)
            sources = None if step is None else self._sources(step, reading)
            if step is None or sources is None:
                yield Leaf(self._named(x) or path if step is None else path or step.path, x, g, step)
                continue
            alone = len(sources) == 1  # what only moves or scales data is called as its source is
            for source, part in zip(sources, _gradients(step, sources, g), strict=True):
                push(source, part, path if alone and path else step.path, reading and not self._begins(x))

    def _named(self, x: Tensor) -> str | None:
        return self._parameters.get(x.untyped_storage().data_ptr())

    def _sources(self, step: Step, reading: bool) -> list[Tensor] | None:
        """The tensors in which an operation is linear, its factors taken as they are; None where nothing is."""
        name, args, steps = step.name, step.args, self._notes.steps
        if name in _CASTS:
            return [args[0]]
        if name in _LINEAR:
            return step.tensors
        if name in _NORMS:
            x, bias = step.norm[::3]
            return [x] if bias is None else [x, bias]
        if name in _PRODUCTS or name in _QUOTIENTS:
            a, b = args[:2]
            if name in _PRODUCTS and not (isinstance(a, Tensor) and a in steps and (_is_factor(b, a, steps))):
                a, b = b, a
            return [a] if isinstance(a, Tensor) and a in steps and _is_factor(b, a, steps) else None
        if name in _READS and reading:
            x, matrix, bias = step.product
            return None if matrix in steps else [x] if bias is None else [x, bias]
        return None


def watched(model: nn.Module, given: Given) -> Stream:
    """Run the model once and note what it does."""
    notes, ran, entered = Notes(tensors_of(given)), {}, {}
    modules = dict(model.named_modules(remove_duplicate=False))
    lists = (nn.ModuleList, nn.Sequential)
    members = {p for p in modules if p and isinstance(modules[p.rpartition(".")[0]], lists)}
    thread = threading.get_ident()

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == thread:
            notes.running.append(path)
            entered[path] = first_tensor((*args, *kwargs.values()))

    def leave(path: str, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != thread:
            return
        notes.running.pop()
        for x in tree_flatten(output)[0]:
            if isinstance(x, Tensor) and notes.names.get(x, path).startswith(path):
                notes.names[x] = path
        if path in members:
            ran.pop(path, None)
            ran[path] = Ran(entered[path], output, notes.now)

    with ExitStack() as stack:
        for path, module in dict(model.named_modules()).items():
            if path:
                hooks = (
                    module.register_forward_pre_hook(partial(enter, path), with_kwargs=True),
                    module.register_forward_hook(partial(leave, path)),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
        with notes:
            logits = ask(model, given)
    return Stream(model, notes, logits, ran)


def _gradients(step: Step, sources: list[Tensor], g: Tensor) -> list[Tensor]:
    """The gradient at each source, in float64, from the one at the result."""
    if step.name in _CASTS:
        return [g]
    if step.name in _NORMS:
        x, weight, eps, bias = step.norm
        wide = x.double()
        centred = wide - wide.mean(-1, keepdim=True) if _NORMS[step.name] else wide
        own = g if weight is None else g * weight.detach().double()
        own = own * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        own = own - own.mean(-1, keepdim=True) if _NORMS[step.name] else own
        return [own] if bias is None else [own, g.sum_to_size(bias.shape)]
    if step.name in _READS:
        x, matrix, bias = step.product
        own = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        used = g.flatten(0, -2).any(0)  # of a vocabulary only the tokens that were asked about
        own += g[..., used] @ matrix[:, used].detach().mT.double()
        return [own] if bias is None else [own, g.sum_to_size(bias.shape)]
    wanted = {id(x): x.detach().double().requires_grad_() for x in sources}
    flat, shape = tree_flatten((step.args, step.kwargs))
    with torch.enable_grad():
        changed = [(wanted[id(x)].clone() if id(x) in wanted else x.double()) if _is_float(x) else x for x in flat]
        args, kwargs = tree_unflatten(changed, shape)
        out = step.func(*args, **kwargs)
        out = out if step.index is None else out[step.index]
    found = torch.autograd.grad(out, [wanted[id(x)] for x in sources], g)
    return list(found)


def _is_factor(b: Any, a: Tensor, steps: Any) -> bool:
    """Whether b scales a: a number or constant, or what a norm divides by, one number for all features of a position."""
    if not isinstance(b, Tensor) or b not in steps:
        return True
    return b.dim() == 0 or b.shape[-1] == 1 < a.shape[-1]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
