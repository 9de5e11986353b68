"""Training and evaluation steps: a model with its loss, compiled, captured in a CUDA graph, and distributed.

`StepRunner` hides these choices from the training loop; all of them compute what the eager model computes. Blocks are
compiled (blocks of one class share their code). If all batches have one shape on a single GPU, the forward and
backward pass is captured in a CUDA graph. With `activation_checkpointing`, a block stores only its inputs and
recomputes the rest in backward.

A pass of a small model consists of a thousand short kernels, and launching them takes the host longer than they run.
A CUDA graph launches them all at once. It reads the batch from, and writes loss and gradients to, the memory it was
captured with; the random numbers of dropout advance from one replay to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.data.batch import Batch
from clearhead.nn import ExpertsFeedForward
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World, blocks_of, local
from clearhead.training.objective import ModelWithLoss, Objective

# Eager calls before the capture, in which compilers and libraries initialize.
WARMUP_CALLS = 3

Pass = Callable[[Batch, "float | Tensor"], Tensor]


class StepRunner:
    """Runs training and evaluation steps of a model.

    Args:
        model: The model; it is moved to the device of `world`.
        config: Settings of the run.
        world: The processes of the run.
        rows: Number of rows of each batch if all batches have one shape, else None.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, world: World, *, rows: int | None) -> None:
        self.model = model.to(world.device).train()
        self._config, self._world, self._rows = config, world, rows
        objective = Objective(smoothing=config.label_smoothing, r_drop_alpha=config.r_drop_alpha)
        if config.compile:
            objective = objective.compiled(one_shape=rows is not None)
        self._routed = [part for part in model.modules() if isinstance(part, ExpertsFeedForward)]
        self._replacements = self._prepare(blocks_of(model))
        self._loss = ModelWithLoss(self.model, objective)
        self._shared = world.wrap(self._loss)
        self._pass: Pass = self._forward_backward
        is_single_gpu = world.parallel is None and world.device.type == "cuda"
        # A CUDA graph can neither reset the random numbers of dropout, to recompute, nor count the tokens of experts.
        if (
            config.compile
            and rows is not None
            and is_single_gpu
            and not (config.activation_checkpointing or self._routed)
        ):
            self._pass = GraphedStep(self._forward_backward, self.model.parameters())

    def _prepare(self, blocks: list[nn.Module]) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
        """Return the methods that are replaced during a forward pass: (module, attribute, replacement)."""
        dynamic = self._rows is None  # one graph then serves batches of every shape
        replacements: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        for routed in self._routed if self._config.compile else ():
            # Experts get a different number of tokens in every batch, which would need a graph each.
            replacements.append((routed, "forward", torch.compiler.disable(routed.forward)))
        if self._config.compile and not self._config.activation_checkpointing:
            for part in blocks or [self.model]:
                # As `part.compile()` does, which would stay in place after training.
                compiled = torch.compile(part._call_impl, dynamic=dynamic)
                replacements.append((part, "_compiled_call_impl", compiled))
        for block in blocks if self._config.activation_checkpointing else ():
            forward = torch.compile(block.forward, dynamic=dynamic) if self._config.compile else block.forward
            replacements.append((block, "forward", functools.partial(checkpoint, forward, use_reentrant=False)))
        return replacements

    def train_step(self, batches: Iterable[Batch], scale: float) -> Tensor:
        """Return the sum of the batches' losses and add its gradient, times `scale`, to the parameters'."""
        batches = list(batches)
        loss = torch.zeros((), dtype=widest(self._world.device), device=self._world.device)
        for batch in batches:
            # The last batch of an epoch may be smaller, and compiling for it would take longer than running it.
            is_odd = self._config.compile and self._rows not in (None, len(batch))
            stance = torch.compiler.set_stance("force_eager") if is_odd else nullcontext()
            with self._world.no_sync(self._shared, last=batch is batches[-1]), stance:
                loss += self._pass(batch, scale)
        return loss

    def _forward_backward(self, batch: Batch, scale: float | Tensor) -> Tensor:
        with replaced(self._replacements), self._autocast():
            total = self._shared(batch)
        (total * scale).backward()
        return total.detach()

    @torch.no_grad()
    def eval_step(self, batches: Iterable[Batch], weights: dict[str, Tensor] | None = None) -> tuple[Tensor, int]:
        """Return the sums of losses (unsmoothed) and correct labels over the batches, and the number of labels.

        `weights` replaces the parameters during the evaluation."""
        sums, labels = torch.zeros(2, dtype=widest(self._world.device), device=self._world.device), 0
        self.model.eval()
        # Compiling for evaluation would take longer than evaluating.
        with swapped_weights(self.model, weights), self._autocast(), torch.compiler.set_stance("force_eager"):
            for batch in batches:
                sums += self._loss(batch.to(self._world.device), score=True)
                labels += batch.n_labels
        self.model.train()
        return sums, labels

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._world.device.type, dtype=torch.bfloat16, enabled=self._config.precision == "bf16")


@contextmanager
def replaced(replacements: Iterable[tuple[nn.Module, str, Callable[..., Any]]]) -> Iterator[None]:
    """Set attributes of modules inside the block, and restore them afterwards: the model belongs to the caller."""
    with ExitStack() as stack:
        for module, name, replacement in replacements:
            attributes = vars(module)
            if name in attributes:
                stack.callback(attributes.__setitem__, name, attributes[name])
            else:
                stack.callback(attributes.pop, name)
            attributes[name] = replacement
        yield


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over many batches: float64 if the device supports it."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def swapped_weights(model: nn.Module, weights: dict[str, Tensor] | None) -> Iterator[None]:
    """Replace the parameters inside the block, and restore them bit for bit afterwards."""
    if weights is None:
        yield
        return
    parameters = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    backup = {name: parameter.clone() for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.copy_(local(weights[name]).detach())
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(backup[name])


# ---------------------------------------------------------------------- CUDA graphs


class GraphedStep:
    """Runs `run(batch, scale)`, which adds gradients to `parameters` and returns a loss, or replays its CUDA graph.

    The graph writes gradients to its own memory, which the next replay overwrites; if a parameter already has a
    gradient (several batches per update), the new one is added to it."""

    def __init__(self, run: Pass, parameters: Iterable[nn.Parameter]) -> None:
        self._run = run
        self._parameters = list(parameters)
        self._calls = 0
        self._stream = torch.cuda.Stream(self._parameters[0].device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch | None = None  # input memory of the graph, and below its outputs
        self._scale = torch.empty(())
        self._loss = torch.empty(())
        self._gradients: list[Tensor | None] = []

    def __call__(self, batch: Batch, scale: float | Tensor) -> Tensor:
        self._calls += 1
        if self._calls <= WARMUP_CALLS or not self._has_captured_shape(batch):
            return self._run_on_side_stream(batch, scale)
        previous = self._detach_gradients()
        if self._graph is None:
            self._capture(batch, scale)
        assert self._graph is not None
        assert self._batch is not None
        tensors = batch.tensors()
        for name, static in self._batch.tensors().items():
            static.copy_(tensors[name])
        self._scale.fill_(scale)
        self._graph.replay()
        for parameter, before, gradient in zip(self._parameters, previous, self._gradients, strict=True):
            parameter.grad = gradient if before is None or gradient is None else before.add_(gradient)
        return self._loss

    def _detach_gradients(self) -> list[Tensor | None]:
        """Return the gradients so far, in memory that the next replay does not overwrite."""
        gradients = [parameter.grad for parameter in self._parameters]
        for i, gradient in enumerate(self._gradients):
            if gradient is not None and gradients[i] is gradient:
                gradients[i] = gradient.clone()
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def _run_on_side_stream(self, batch: Batch, scale: float | Tensor) -> Tensor:
        """Run on the capture stream, because autograd requires one stream per parameter."""
        current = torch.cuda.current_stream(batch.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._run(batch, scale)
        current.wait_stream(self._stream)
        return loss

    def _has_captured_shape(self, batch: Batch) -> bool:
        if self._batch is None:
            return True
        captured = {name: tensor.shape for name, tensor in self._batch.tensors().items()}
        return captured == {name: tensor.shape for name, tensor in batch.tensors().items()}

    def _capture(self, batch: Batch, scale: float | Tensor) -> None:
        self._batch = batch.map(torch.clone)
        self._scale = torch.full((), float(scale), device=batch.device)
        torch.cuda.empty_cache()  # cached memory of the warm-up is not usable by the graph
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._loss = self._run(self._batch, self._scale)
        self._gradients = [parameter.grad for parameter in self._parameters]
