"""Decompose the residual stream of one run: the modules that add to it, and how the logits depend on it.

While the model runs, every operation whose result depends on the input is recorded. The records are then traversed
backward from the logits through all linear operations: sums, data movement, constant factors, the unembedding matrix.
The divisor of a norm is one number per position; it is fixed to its value in the run, which makes the norm linear too.
The traversal ends at the terms that were added: outputs of heads and feed-forward layers, and embeddings. So

    logit = Σ over the terms of (gradient at the term) · (value of the term)

holds except for rounding. No model is special-cased; a term is named after the module that returned it.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead._core.call_types import Args, Kwargs, TorchFunction
from clearhead.analysis.inputs.model_inputs import ModelArgs, check_model, input_tensors, run_logits
from clearhead.analysis.inputs.module_calls import observing_modules
from clearhead.analysis.inputs.outputs import first_tensor

# Operations by name, without the underscores around it: `__iadd__` is iadd.
_SUM = re.compile("[ri]?(add|sub)|subtract|mean|sum")
_MOVE = re.compile(
    "neg|cat|concat|concatenate|stack|view|reshape|flatten|unflatten|transpose|swapaxes|permute|movedim|t|squeeze|"
    "unsqueeze|expand|expand_as|repeat|contiguous|clone|detach|getitem|select|narrow|index_select|gather|chunk|split|"
    "unbind|dropout|roll|flip"
)
_CAST = re.compile("to|float|double|half|bfloat16|type|type_as")
_TIMES = re.compile("[ri]?mul|multiply")
_OVER = re.compile("i?(true)?div|true_divide|divide")
_NORM = re.compile("layer_norm|rms_norm")
_READ = re.compile("linear|addmm|matmul|mm")  # unembedding
_FOLLOWED = re.compile("|".join(pattern.pattern for pattern in (_SUM, _MOVE, _CAST, _TIMES, _OVER, _NORM, _READ)))
_IN_PLACE = re.compile(r"\w*[^_]_|__i(add|sub|mul|truediv|pow)__|__setitem__")


@dataclass(frozen=True, eq=False)
class ResidualOp:
    """One operation: how to repeat it, the module that ran it, and which of its results is meant."""

    number: int
    name: str
    path: str = ""
    index: int | None = None
    func: Any = None
    args: Args = ()
    kwargs: Kwargs | None = None

    def by_name(self, *names: str) -> Kwargs:
        return dict(zip(names, self.args, strict=False)) | dict(self.kwargs or {})

    @property
    def product(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of a matrix product: x, the right factor, and the summand."""
        if self.name == "addmm":
            return self.args[1], self.args[2], self.args[0]
        if self.name == "linear":
            arguments = self.by_name("input", "weight", "bias")
            return arguments["input"], arguments["weight"].mT, arguments.get("bias")
        return self.args[0], self.args[1], None

    @property
    def norm(self) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
        """Of torch's layer_norm or rms_norm: x, weight, bias and eps."""
        is_layer = self.name == "layer_norm"
        arguments = self.by_name("input", "normalized_shape", "weight", *["bias"] * is_layer, "eps")
        eps = arguments.get("eps")
        usual = 1e-5 if is_layer else torch.finfo(arguments["input"].dtype).eps
        return arguments["input"], arguments.get("weight"), arguments.get("bias"), usual if eps is None else eps


StreamTensor: TypeAlias = tuple[str, Tensor, Any, ResidualOp | None]
"""Path, value, gradient (None if the stream is walked without gradients) and operation: the fields of a `Term`."""


@dataclass(frozen=True, eq=False)
class Term:
    """A summand of the stream: its name, its value and the gradient there."""

    path: str
    value: Tensor
    gradient: Tensor
    step: ResidualOp | None  # None: a constant, such as a bias or a position table

    @property
    def shares(self) -> Tensor:
        return self.gradient.double() * self.value.detach().double()


class ResidualOpRecorder(TorchFunctionMode):
    """Record every operation whose result depends on the given tensors; records are freed with their tensors."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.steps: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # Tensor → Step
        # Tensor → the path of the outermost module that returned it
        self.names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.running: list[str] = []
        self.count = itertools.count(1)
        for x in inputs:
            self.steps[x] = ResidualOp(0, "input")

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        before = args
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and _IN_PLACE.fullmatch(name):
            # In-place: keep the previous value as a separate tensor.
            copy = args[0].detach().clone()
            for notes in (self.steps, self.names):
                if args[0] in notes:
                    notes[copy] = notes.pop(args[0])
            before = (copy, *args[1:])
        out = func(*args, **kwargs)
        results = args[0] if name == "__setitem__" else out
        read = tree_flatten((before, kwargs))[0]
        several = isinstance(results, (tuple, list))
        if any(isinstance(x, Tensor) and x in self.steps for x in read):
            name = name.strip("_")
            path = self.running[-1] if self.running else ""
            again = (func, before, kwargs) if _FOLLOWED.fullmatch(name) else ()
            for index, result in enumerate(results if several else [results]):
                # Dropout in evaluation mode returns its input.
                if isinstance(result, Tensor) and not any(result is x for x in read):
                    self.steps[result] = ResidualOp(next(self.count), name, path, index if several else None, *again)
        return out


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One call of a member of an nn.ModuleList or nn.Sequential: input, output and completion time.

    `input_value` and `value` are copies, because a later operation may change the input and output in place.
    """

    input_value: Tensor | None
    output: object
    value: Tensor | None  # of the main tensor of `output`
    number: int

    @property
    def keeps_shape(self) -> bool:
        return self.value is not None and self.input_value is not None and self.value.shape == self.input_value.shape


class ResidualStream:
    """One run of a model and its linear decomposition from the logits backward.

    `blocks` are the layers of the decomposition: members of an nn.ModuleList or nn.Sequential that pass the stream on.
    `contributors` are the modules in them that add to it: attention and feed-forward layers.
    """

    def __init__(
        self, model: nn.Module, notes: ResidualOpRecorder, logits: Tensor, ran: Mapping[str, BlockCall]
    ) -> None:
        self.logits, self.ran = logits, ran  # by path, in order of completion
        self._notes = notes
        self._parameters = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        way = list(self._walk(None))
        passed = {id(leaf[1]) for leaf, is_end, on_stream in way if on_stream and not is_end}
        # Some norms compute in float32 regardless of the model's dtype.
        self.rounding = max(torch.finfo(leaf[1].dtype).eps for leaf, *_ in way if _is_float(leaf[1]))
        holds = {path: any(True for _ in model.get_submodule(path).children()) for path in ran}
        blocks = [path for path, call in ran.items() if holds[path] and id(first_tensor(call.output)) in passed]
        if not blocks:  # the head is not linear: take the list that ran last and preserves shapes
            alike = [path for path, call in ran.items() if holds[path] and call.keeps_shape]
            blocks = [path for path in alike if path.rpartition(".")[0] == alike[-1].rpartition(".")[0]]
        self.blocks = [path for path in blocks if not any(path.startswith(f"{other}.") for other in blocks)]
        ends = [leaf[0] for leaf, is_end, _ in reversed(way) if is_end]
        modules = dict(model.named_modules())
        within = tuple(f"{block}." for block in self.blocks)
        self.contributors = [path for path in dict.fromkeys(ends) if path in modules and path.startswith(within)]

    def terms(self, gradient: Tensor) -> list[Term]:
        """Return the summands, with the gradient of (gradient · logits).sum() at each."""
        return [Term(*leaf) for leaf, is_end, _ in self._walk(gradient) if is_end]

    def _walk(self, gradient: Tensor | None) -> Iterator[tuple[StreamTensor, bool, bool]]:
        """Iterate over the tensors backward: each as a term, whether it is one, and whether it is on the stream.

        The order is the reverse order of computation, so that each tensor is visited once with its complete gradient.
        """
        steps, names = self._notes.steps, self._notes.names
        pending: dict[int, tuple[Tensor, Any, str, bool]] = {}
        queue: list[tuple[int, int]] = []

        def push(x: Tensor, g: object, path: str, reading: bool) -> None:
            if id(x) not in pending:
                heapq.heappush(queue, (-steps[x].number if x in steps else 0, id(x)))
            elif g is not None:
                g = pending[id(x)][1] + g
            pending[id(x)] = (x, g, names.get(x) or path, reading)

        push(self.logits, gradient, "", True)
        while queue:
            x, g, path, reading = pending.pop(heapq.heappop(queue)[1])
            step = steps.get(x)
            sources = None if step is None else self._sources(step, reading)
            if step is None:
                path = self._parameters.get(x.untyped_storage().data_ptr()) or path
            on_stream = step is not None and (_SUM.fullmatch(step.name) or _NORM.fullmatch(step.name)) is not None
            yield (path or step.path if step else path, x, g, step), sources is None, on_stream or not reading
            if step is None or sources is None:
                continue
            gradients = [None] * len(sources) if g is None else _gradients(step, sources, g)
            for source, part in zip(sources, gradients, strict=True):
                # Operations that only move or scale data get the name of their result.
                push(source, part, path if len(sources) == 1 and path else step.path, reading and not on_stream)

    def _sources(self, step: ResidualOp, reading: bool) -> list[Tensor] | None:
        """Return the tensors in which an operation is linear, with its factors fixed; None if it is not linear."""
        name = step.name
        args = step.args
        steps = self._notes.steps
        if _CAST.fullmatch(name):
            return [args[0]]
        if _SUM.fullmatch(name) or _MOVE.fullmatch(name):
            return list({id(x): x for x in tree_flatten((args, step.kwargs))[0] if _is_float(x)}.values())
        if _NORM.fullmatch(name):
            return [x for x in step.norm[::2][:2] if x is not None]
        if _TIMES.fullmatch(name) or _OVER.fullmatch(name):
            ways = [args[:2]] if _OVER.fullmatch(name) else [args[:2], args[1::-1]]
            return next(([a] for a, b in ways if isinstance(a, Tensor) and a in steps and self._scales(b, a)), None)
        if _READ.fullmatch(name) and reading:
            x, matrix, bias = step.product
            return None if matrix in steps else [x] if bias is None else [x, bias]
        return None

    def _scales(self, b: object, a: Tensor) -> bool:
        """Return whether b is a factor of a: a constant, or one number for all features (the divisor of a norm)."""
        if not isinstance(b, Tensor) or b not in self._notes.steps:
            return True
        return b.dim() == 0 or b.shape[-1] == 1 < a.shape[-1]


def record_residual_stream(model: nn.Module, args: ModelArgs) -> ResidualStream:
    """Run the model once and record its operations."""
    check_model(model)
    notes = ResidualOpRecorder(input_tensors(args))
    ran: dict[str, BlockCall] = {}
    input_values: dict[str, Tensor | None] = {}
    modules = dict(model.named_modules())
    lists = (nn.ModuleList, nn.Sequential)
    in_list = {path for path in modules if path and isinstance(modules[path.rpartition(".")[0]], lists)}

    def enter(path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if path:
            notes.running.append(path)
        if path in in_list:
            input_values[path] = _copy(first_tensor((*args, *kwargs.values())))

    def leave(path: str, module: nn.Module, output: object) -> None:
        if not path:
            return
        notes.running.pop()
        for x in tree_flatten(output)[0]:
            if isinstance(x, Tensor) and f"{notes.names.get(x, path)}.".startswith(f"{path}."):
                notes.names[x] = path
        if path in in_list:
            ran.pop(path, None)  # keep the last call
            ran[path] = BlockCall(input_values[path], output, _copy(first_tensor(output)), next(notes.count))

    with observing_modules(model, enter, leave), notes:
        logits = run_logits(model, args)
    return ResidualStream(model, notes, logits, ran)


def _gradients(step: ResidualOp, sources: list[Tensor], g: Tensor) -> list[Tensor]:
    """Return the gradient at each source, in float64, from the gradient at the result."""
    if _CAST.fullmatch(step.name):
        return [g]
    if _NORM.fullmatch(step.name):
        x, weight, bias, eps = step.norm
        wide, g = x.double(), g.double()
        wide = wide - wide.mean(-1, keepdim=True) if step.name == "layer_norm" else wide
        input_gradient = (g if weight is None else g * weight.detach().double()) * (
            wide.square().mean(-1, True) + eps
        ).rsqrt()
        input_gradient = (
            input_gradient - input_gradient.mean(-1, keepdim=True) if step.name == "layer_norm" else input_gradient
        )
        return [input_gradient] if bias is None else [input_gradient, g.sum_to_size(bias.shape)]
    if _READ.fullmatch(step.name):
        _, matrix, bias = step.product
        used = g.flatten(0, -2).any(0)  # only the requested tokens of the vocabulary
        input_gradient = g[..., used].double() @ matrix[:, used].detach().mT.double()
        return [input_gradient] if bias is None else [input_gradient, g.sum_to_size(bias.shape).double()]
    leaf_inputs = {id(x): x.detach().double().requires_grad_() for x in sources}
    flat, shape = tree_flatten((step.args, step.kwargs))
    with torch.enable_grad():
        wide_args = [
            (leaf_inputs[id(x)].clone() if id(x) in leaf_inputs else x.double()) if _is_float(x) else x for x in flat
        ]
        args, kwargs = tree_unflatten(wide_args, shape)
        out = step.func(*args, **kwargs)
    return list(
        torch.autograd.grad(out if step.index is None else out[step.index], list(leaf_inputs.values()), g.double())
    )


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().clone()


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
