"""Running what was predicted: random inputs for any model, one training step or one forward pass, and what it took.

On a GPU the peak is the allocator's own. On a CPU every tensor's storage is watched from its making to its end,
which sees what torch returns from its operations and not what a kernel needs while it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.attention import MultiHeadAttention
from clearhead.costs.machine import one_thread, synchronise, time_of
from clearhead.errors import ConfigError
from clearhead.masks import Mask
from clearhead.models import Config, DecoderConfig, EncoderConfig, EncoderDecoderConfig, VisionConfig
from clearhead.models.autoencoder import AutoencoderConfig
from clearhead.models.convnet import ConvNetConfig
from clearhead.models.linear import LogisticRegressionConfig
from clearhead.models.recurrent import Classify, RecurrentConfig
from clearhead.models.recurrent_seq2seq import RecurrentSeq2SeqConfig

__all__ = ["Example", "Measured", "example", "measure", "measure_model", "set_impl", "watch_storages"]

Tokens = int | tuple[int, int] | None


@dataclass(frozen=True)
class Example:
    """Inputs of one forward pass, what the answers should be (None: vectors, whose squares are the loss), and the
    mask.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def run(self, model: nn.Module) -> Tensor:
        return model(*self.inputs, **dict(self.options))

    def loss(self, model: nn.Module) -> Tensor:
        # No variable for the logits: they are let go as soon as the loss has read them.
        if self.targets is None:
            return self.run(model).square().mean()
        return F.cross_entropy(self.run(model).flatten(0, -2), self.targets)


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    seconds: float
    peak_bytes: int


def example(
    config: Config | MultiHeadAttention,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mask: Mask | None = None,
) -> Example:
    """Random inputs for a model of this configuration."""
    source, target = tokens if isinstance(tokens, tuple) else (tokens or 1, tokens or 1)

    def ids(vocab: int, length: int) -> Tensor:
        return torch.randint(0, vocab, (batch, length), device=device)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, device=device, dtype=dtype)

    if isinstance(config, EncoderConfig):
        return Example((ids(config.vocab_size, target),), None, _masked(mask))
    if isinstance(config, DecoderConfig):
        options = _masked(mask)
        if config.cross_attention:
            options += (("memory", numbers(source, config.d_model).requires_grad_()),)
        return Example((ids(config.vocab_size, target),), ids(config.vocab_size, target).flatten(), options)
    if isinstance(config, (EncoderDecoderConfig, RecurrentSeq2SeqConfig)):
        vocab = config.source_vocab_size or config.vocab_size
        pair = (ids(vocab, source), ids(config.vocab_size, target))
        return Example(pair, ids(config.vocab_size, target).flatten(), _masked(mask, "target_mask"))
    if isinstance(config, RecurrentConfig):
        classes = config.task.n_classes if isinstance(config.task, Classify) else config.vocab_size
        answers = ids(classes, 1 if isinstance(config.task, Classify) else target).flatten()
        return Example((ids(config.vocab_size, target),), answers)
    if isinstance(config, MultiHeadAttention):
        x = numbers(target, config.d_model).requires_grad_()
        other = () if source == target else (numbers(source, config.d_model).requires_grad_(),)
        return Example((x, *other), None, _masked(mask))
    return _fixed_example(config, numbers, lambda classes: ids(classes, 1).flatten())


def _fixed_example(config: Config, numbers: Callable[..., Tensor], answers: Callable[[int], Tensor]) -> Example:
    """Inputs of models that read no sequence."""
    if isinstance(config, VisionConfig):
        return Example((numbers(config.n_channels, *config.image_size),), answers(config.n_classes))
    if isinstance(config, ConvNetConfig):
        return Example((numbers(config.n_channels, *config.image_size),), answers(config.n_classes))
    if isinstance(config, LogisticRegressionConfig):
        return Example((numbers(config.n_features),), answers(config.n_classes))
    if isinstance(config, AutoencoderConfig):
        return Example((numbers(config.n_features),))
    raise ConfigError(f"no inputs are known for a {type(config).__name__}")


def _masked(mask: Mask | None, name: str = "mask") -> tuple[tuple[str, Any], ...]:
    return () if mask is None else ((name, mask),)


def set_impl(model: nn.Module, impl: str) -> nn.Module:
    """The same model with every attention layer computed this way."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.impl = impl  # type: ignore[assignment]
    return model


# ---------------------------------------------------------------------- measuring


def measure(
    config: Any,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    mask: Mask | None = None,
    impl: str = "auto",
    device: torch.device | str = "cpu",
    seconds: float = 0.5,
) -> Measured:
    """Builds the model, runs it until it is steady, then takes the peak of one run and the time of several."""
    with torch.device(device):
        model = set_impl(_built(config), impl).to(dtype)
    config = model if isinstance(model, MultiHeadAttention) else config
    given = example(config, tokens=tokens, batch=batch, dtype=dtype, device=device, mask=mask)
    with one_thread(device):
        return measure_model(model, given, training=training, device=device, seconds=seconds)


def _built(config: Any) -> nn.Module:
    """The model of a configuration; one attention layer, where its sizes are all there is."""
    if isinstance(config, Config):
        return config.build()
    sizes = {"n_kv_heads": config.n_kv_heads, "d_head": config.d_head, "bias": config.bias}
    return MultiHeadAttention(config.d_model, config.n_heads, **sizes)


def measure_model(
    model: nn.Module, given: Example, *, training: bool, device: torch.device | str, seconds: float = 0.5
) -> Measured:
    """A model that is there already. With `seconds` 0 it is not timed."""
    step = _step(model, given, training)
    step()
    peak = _peak(step, model, given, device)
    return Measured(time_of(step, device, seconds=seconds) if seconds else 0.0, peak)


def _step(model: nn.Module, batch: Example, training: bool) -> Callable[[], None]:
    """One training step, or one forward pass without gradients."""
    model.train(training)
    if not training:

        def forward() -> None:
            with torch.inference_mode():
                batch.run(model)

        return forward
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        batch.loss(model).backward()
        optimiser.step()

    return step


def _peak(step: Callable[[], None], model: nn.Module, batch: Example, device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        step()
        synchronise(device)
        torch.cuda.reset_peak_memory_stats()
        step()
        synchronise(device)
        return torch.cuda.max_memory_allocated()
    with watch_storages() as watch:
        for tensor in (*model.parameters(), *(p.grad for p in model.parameters()), *_tensors(batch)):
            if tensor is not None:
                watch.saw(tensor)
        step()  # the optimiser's state is seen when it is touched, so the peak of a second run is the one that counts
        watch.peak = watch.now
        step()
    return watch.peak


def _tensors(batch: Example) -> list[Tensor | None]:
    return [*batch.inputs, batch.targets, *(v for _, v in batch.options if isinstance(v, Tensor))]


class _Watch(TorchDispatchMode):
    """Counts the bytes of all storages that torch's operations return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def saw(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += n_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, n_bytes)

    def _gone(self, key: int, n_bytes: int) -> None:
        self._known.discard(key)
        self.now -= n_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(tensor, Tensor):
                self.saw(tensor)
        return out


@contextmanager
def watch_storages() -> Iterator[_Watch]:
    """Inside, every storage that an operation takes or makes is on the books of the watch."""
    with _Watch() as watch:
        yield watch
