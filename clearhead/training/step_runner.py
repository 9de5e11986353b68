"""Training and evaluation steps: a model with its loss, compiled, captured in a CUDA graph, and distributed.

`StepRunner` hides these choices from the training loop; all of them compute what the eager model computes. Blocks are
compiled (blocks of one class share their code). If all batches have one shape on a single GPU, the forward and
backward pass is captured in a CUDA graph. With `activation_checkpointing`, a block stores only its inputs and
recomputes the rest in backward. The random numbers of dropout advance from one replay of a graph to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.data.batch import Batch
from clearhead.models import storage
from clearhead.nn import ExpertsFeedForward
from clearhead.nn.modes import eval_mode, iter_modules
from clearhead.ops.cuda_graph import CUDAGraphs, GraphBackend
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World, local, transformer_blocks
from clearhead.training.objective import ModelWithLoss, Objective

# Eager calls before the capture, in which compilers and libraries initialize.
WARMUP_CALLS = 3

Step = Callable[[Batch, "float | Tensor"], Tensor]


class MethodReplacement(NamedTuple):
    """An attribute of a module that has another value during a forward pass."""

    module: nn.Module
    attribute: str
    value: Callable[..., object]


class StepRunner:
    """Runs training and evaluation steps of a model.

    The model is on the device of `world` and in the mode that the caller has set; it is left as it was, apart from
    gradients.

    Args:
        model: The model.
        config: Settings of the run.
        world: The processes of the run.
        rows: Number of rows of each batch if all batches have one shape, else None.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, world: World, *, rows: int | None) -> None:
        self.model = model
        self._config = config
        self._world = world
        self._rows = rows
        objective = Objective(smoothing=config.label_smoothing, r_drop_alpha=config.r_drop_alpha)
        if config.compile:
            objective = objective.compiled(one_shape=rows is not None)
        self._experts = [module for module in model.modules() if isinstance(module, ExpertsFeedForward)]
        self._replacements = self._method_replacements()
        self._model_with_loss = ModelWithLoss(model, objective)
        self._wrapped = world.wrap(self._model_with_loss)
        self._step = self._choose_step()

    def _choose_step(self) -> Step:
        """Return the function that computes the loss and the gradients of a batch."""
        config, world = self._config, self._world
        has_one_shape = self._rows is not None
        is_single_gpu = world.parallel is None and world.device.type == "cuda"
        # A CUDA graph can neither reset the random numbers of dropout, to recompute, nor count the tokens of experts.
        is_capturable = not config.activation_checkpointing and not self._experts
        if config.compile and has_one_shape and is_single_gpu and is_capturable:
            return GraphedStep(self._forward_backward, self.model.parameters())
        return self._forward_backward

    def _method_replacements(self) -> list[MethodReplacement]:
        """Return the methods that compilation and activation checkpointing replace during a forward pass."""
        compiles = self._config.compile
        checkpoints = self._config.activation_checkpointing
        dynamic = self._rows is None  # one graph then serves batches of every shape
        blocks = transformer_blocks(self.model)
        replacements = []
        for experts in self._experts if compiles else ():
            # Experts get a different number of tokens in every batch, which would need a graph each.
            replacements.append(MethodReplacement(experts, "forward", torch.compiler.disable(experts.forward)))
        for part in blocks or [self.model] if compiles and not checkpoints else ():
            # As `part.compile()` does, which would stay in place after training.
            compiled = torch.compile(part._call_impl, dynamic=dynamic)
            replacements.append(MethodReplacement(part, "_compiled_call_impl", compiled))
        for block in blocks if checkpoints else ():
            forward = torch.compile(block.forward, dynamic=dynamic) if compiles else block.forward
            recomputed = functools.partial(checkpoint, forward, use_reentrant=False)
            replacements.append(MethodReplacement(block, "forward", recomputed))
        return replacements

    def train_step(self, batches: Sequence[Batch], scale: float) -> Tensor:
        """Return the sum of the batches' losses and add its gradient, times `scale`, to the parameters'."""
        loss = torch.zeros((), dtype=widest(self._world.device), device=self._world.device)
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with self._world.no_sync(self._wrapped, last=is_last), self._compiler_stance(batch):
                loss += self._step(batch, scale)
        return loss

    def _compiler_stance(self, batch: Batch) -> AbstractContextManager[object]:
        """Run a batch of another shape eagerly: compiling for the last batch of an epoch would take longer."""
        has_other_shape = self._config.compile and self._rows not in (None, len(batch))
        return torch.compiler.set_stance("force_eager") if has_other_shape else nullcontext()

    def _forward_backward(self, batch: Batch, scale: float | Tensor) -> Tensor:
        with replace_methods(self._replacements), self._autocast():
            total: Tensor = self._wrapped(batch)
        (total * scale).backward()
        return total.detach()

    @torch.no_grad()
    def eval_step(self, batches: Iterable[Batch], weights: dict[str, Tensor] | None = None) -> tuple[Tensor, int]:
        """Return the sums of losses (unsmoothed) and correct labels over the batches, and the number of labels.

        `weights` replaces parameters and buffers of these names during the evaluation."""
        sums = torch.zeros(2, dtype=widest(self._world.device), device=self._world.device)
        labels = 0
        # Compiling for evaluation would take longer than evaluating.
        eager = torch.compiler.set_stance("force_eager")
        with eval_mode(iter_modules(self.model)), swapped_weights(self.model, weights), self._autocast(), eager:
            for batch in batches:
                sums += self._model_with_loss(batch.to(self._world.device), score=True)
                labels += batch.n_labels
        return sums, labels

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._world.device.type, dtype=torch.bfloat16, enabled=self._config.precision == "bf16")


@contextmanager
def replace_methods(replacements: Iterable[MethodReplacement]) -> Iterator[None]:
    """Set attributes of modules inside the block, and restore them afterwards: the model belongs to the caller."""
    with ExitStack() as stack:
        for module, name, value in replacements:
            attributes = vars(module)
            if name in attributes:
                stack.callback(attributes.__setitem__, name, attributes[name])
            else:
                stack.callback(attributes.pop, name)
            attributes[name] = value
        yield


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into training mode inside the block, and restore the mode of each afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over many batches: float64 if the device supports it."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def swapped_weights(model: nn.Module, weights: dict[str, Tensor] | None) -> Iterator[None]:
    """Replace parameters and buffers inside the block, and restore them bit for bit afterwards."""
    if weights is None:
        yield
        return
    current = {names[0]: local(tensor).detach() for names, tensor in storage.named_tensors(model)}
    backup = {name: current[name].clone() for name in weights}
    try:
        for name, weight in weights.items():
            current[name].copy_(local(weight).detach())
        yield
    finally:
        for name, weight in backup.items():
            current[name].copy_(weight)


# ---------------------------------------------------------------------- CUDA graphs


class GraphedStep:
    """Runs `step(batch, scale)`, which adds gradients to `parameters` and returns a loss, or replays its CUDA graph.

    The graph reads the batch from, and writes loss and gradients to, its own memory. The next replay overwrites it; if
    a parameter already has a gradient (several batches per update), the new one is added to it.

    Args:
        step: The step to capture.
        parameters: Parameters whose gradients the step computes, all on one device.
        graphs: Backend of the capture; by default CUDA graphs.
    """

    def __init__(
        self, step: Step, parameters: Iterable[nn.Parameter], *, graphs: SideStreamGraphs | None = None
    ) -> None:
        self._step = step
        self._parameters = list(parameters)
        self._graphs = SideStreamCUDAGraphs(self._parameters[0].device) if graphs is None else graphs
        self._replay: Callable[[], None] | None = None
        self._n_calls = 0
        self._batch: Batch | None = None  # input memory of the graph, and below its outputs
        self._scale = torch.empty(())
        self._loss = torch.empty(())
        self._gradients: list[Tensor | None] = []

    def __call__(self, batch: Batch, scale: float | Tensor) -> Tensor:
        self._n_calls += 1
        if self._n_calls <= WARMUP_CALLS or not self._has_captured_shape(batch):
            with self._graphs.side_stream():  # autograd requires one stream per parameter
                return self._step(batch, scale)
        previous = self._detach_gradients()
        if self._batch is None:
            self._batch = batch.map(torch.clone)
            self._scale = torch.empty((), dtype=torch.float32, device=batch.device)
        tensors = batch.tensors()
        for name, static in self._batch.tensors().items():
            static.copy_(tensors[name])
        self._scale.fill_(scale)
        if self._replay is None:
            self._replay = self._graphs.capture(self._captured_step)
        self._replay()
        for parameter, before, gradient in zip(self._parameters, previous, self._gradients, strict=True):
            parameter.grad = gradient if before is None or gradient is None else before.add_(gradient)
        return self._loss

    def _captured_step(self) -> None:
        assert self._batch is not None
        self._loss = self._step(self._batch, self._scale)
        self._gradients = [parameter.grad for parameter in self._parameters]

    def _detach_gradients(self) -> list[Tensor | None]:
        """Return the gradients so far, in memory that the next replay does not overwrite."""
        gradients = [parameter.grad for parameter in self._parameters]
        for i, gradient in enumerate(self._gradients):
            if gradient is not None and gradients[i] is gradient:
                gradients[i] = gradient.clone()
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def _has_captured_shape(self, batch: Batch) -> bool:
        if self._batch is None:
            return True
        captured = {name: tensor.shape for name, tensor in self._batch.tensors().items()}
        return captured == {name: tensor.shape for name, tensor in batch.tensors().items()}


@runtime_checkable
class SideStreamGraphs(GraphBackend, Protocol):
    """A graph backend that also runs eager steps on the stream of its captures."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Return a context in which operations run after those of the current stream, and before the later ones."""


class SideStreamCUDAGraphs:
    """Captures CUDA graphs on one side stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._backend = CUDAGraphs(stream=self._stream, error_mode="global")

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        torch.cuda.empty_cache()  # cached memory of the warm-up is not usable by the graph
        return self._backend.capture(run)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)
