"""How a batch becomes a loss and gradients: the model with its loss, compiled, recorded, shared among processes.

The loop asks for passes and does not know which way they take. There is a plain way, and these give its numbers: blocks
are compiled (all of a kind share their code); where every batch has one shape, on one GPU, a whole pass is recorded
once and replayed; with `activation_checkpointing` a block stores its
inputs only, and computes the rest again in backward.

A pass of a small model is a thousand short kernels, and starting them one by one takes the host longer than they run. A
recording (a CUDA graph) starts them all at once. It reads the batch from, and leaves loss and gradients in, the very
memory it was recorded with; the random numbers of dropout go on from one replay to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.data.batch import Batch
from clearhead.layers import ExpertsFeedForward
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World, blocks_of, local
from clearhead.training.loss import ModelWithLoss, Objective

# StepRunner that run as they are before one is recorded: compilers and libraries prepare themselves in the first.
_WARM = 3

Pass = Callable[[Batch, "float | Tensor"], Tensor]


class StepRunner:
    """The passes of one model in one world. `rows` is how many rows each batch has, where all have one shape."""

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
        alone = world.parallel is None and world.device.type == "cuda"
        # A recording cannot put the random numbers of dropout back, to recompute, nor count the tokens of experts.
        if config.compile and rows is not None and alone and not (config.activation_checkpointing or self._routed):
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
        """The sum of the batches' losses; its gradient, times `scale`, is then the parameters'."""
        batches = list(batches)
        loss = torch.zeros((), dtype=widest(self._world.device), device=self._world.device)
        for batch in batches:
            # The last batch of an epoch may be smaller: compiling for it alone would not pay.
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
        """The sum of losses (without smoothing) and of right answers over this process's batches, with these weights
        if given; and how many labels they are."""
        sums, labels = torch.zeros(2, dtype=widest(self._world.device), device=self._world.device), 0
        self.model.eval()
        # Compiling again for evaluation would take longer than evaluating.
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
    """Sums over many batches are kept in float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def swapped_weights(model: nn.Module, weights: dict[str, Tensor] | None) -> Iterator[None]:
    """The model with other weights inside the block, and its own again afterwards, bit for bit."""
    if weights is None:
        yield
        return
    own = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    kept = {name: parameter.clone() for name, parameter in own.items()}
    try:
        for name, parameter in own.items():
            parameter.copy_(local(weights[name]).detach())
        yield
    finally:
        for name, parameter in own.items():
            parameter.copy_(kept[name])


# ---------------------------------------------------------------------- recorded


class GraphedStep:
    """Calls `run(batch, scale)`, which adds gradients to `parameters` and returns a loss, or replays such a call.

    A recording leaves its gradients in memory of its own, which the next replay writes over; where a parameter has a
    gradient already, as when several batches make one update, they are added to it."""

    def __init__(self, run: Pass, parameters: Iterable[nn.Parameter]) -> None:
        self._run = run
        self._parameters = list(parameters)
        self._calls = 0
        self._stream = torch.cuda.Stream(self._parameters[0].device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch | None = None  # what the recording reads, and below what it writes
        self._scale = torch.empty(())
        self._loss = torch.empty(())
        self._gradients: list[Tensor | None] = []

    def __call__(self, batch: Batch, scale: float | Tensor) -> Tensor:
        self._calls += 1
        if self._calls <= _WARM or not self._is_like_the_recorded(batch):
            return self._run_aside(batch, scale)
        held = self._take_gradients()
        if self._graph is None:
            self._record(batch, scale)
        assert self._graph is not None
        assert self._batch is not None
        given = batch.tensors()
        for name, mine in self._batch.tensors().items():
            mine.copy_(given[name])
        self._scale.fill_(scale)
        self._graph.replay()
        for parameter, before, gradient in zip(self._parameters, held, self._gradients, strict=True):
            parameter.grad = gradient if before is None or gradient is None else before.add_(gradient)
        return self._loss

    def _take_gradients(self) -> list[Tensor | None]:
        """The gradients so far, out of the way of the next replay."""
        held = [parameter.grad for parameter in self._parameters]
        for i, gradient in enumerate(self._gradients):
            if gradient is not None and held[i] is gradient:
                held[i] = gradient.clone()
        for parameter in self._parameters:
            parameter.grad = None
        return held

    def _run_aside(self, batch: Batch, scale: float | Tensor) -> Tensor:
        """Runs on the stream of the recording: autograd must not meet parameters that it knows from another one."""
        current = torch.cuda.current_stream(batch.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._run(batch, scale)
        current.wait_stream(self._stream)
        return loss

    def _is_like_the_recorded(self, batch: Batch) -> bool:
        if self._batch is None:
            return True
        own, given = ({name: x.shape for name, x in one.tensors().items()} for one in (self._batch, batch))
        return own == given

    def _record(self, batch: Batch, scale: float | Tensor) -> None:
        self._batch = batch.map(torch.clone)
        self._scale = torch.full((), float(scale), device=batch.device)
        torch.cuda.empty_cache()  # what the first passes left would stay beside the recording's own memory
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._loss = self._run(self._batch, self._scale)
        self._gradients = [parameter.grad for parameter in self._parameters]
