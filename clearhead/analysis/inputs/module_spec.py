"""Describe how a module is called: inputs, masks, padding and cache.

The properties do not depend on any library: they pass `CallInputs` to a `ModuleSpec`, which calls its module. The
`ModuleSpec` of models of this project, transformers, torch.nn and timm is inferred (`infer_spec.py`); for other modules
the caller provides it.

    B batch   T tokens   S source tokens   M model width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead._core.call_types import Kwargs
from clearhead._core.validation import check_int
from clearhead.errors import ConfigError
from clearhead.masks import Mask


@dataclass(frozen=True)
class Ids:
    """The module takes token ids from 0 to `vocab_size` − 1, shape (B, T).

    Args:
        vocab_size: Size of the vocabulary.

    Raises:
        ConfigError: The size is not a whole number of at least 1.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        check_int(self.vocab_size, "vocab_size", minimum=1)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Return random ids of shape (batch, length)."""
        return torch.randint(self.vocab_size, (batch, length), generator=generator)


@dataclass(frozen=True)
class Embeddings:
    """The module takes vectors, shape (B, T, `width`).

    Args:
        width: Size of each vector.

    Raises:
        ConfigError: The width is not a whole number of at least 1.
    """

    width: int

    def __post_init__(self) -> None:
        check_int(self.width, "width", minimum=1)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Return normal values of shape (batch, length, width)."""
        return torch.randn(batch, length, self.width, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Values:
    """The module takes tensors without a sequence dimension, shape (B, *`shape`), such as images or features.

    Args:
        shape: Shape of one input, without the batch dimension.

    Raises:
        ConfigError: A size is not a whole number of at least 1.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for size in self.shape:
            check_int(size, "a size of shape", minimum=1)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Return normal values of shape (batch, *shape)."""
        return torch.randn(batch, *self.shape, generator=generator, dtype=torch.float64)


Inputs = Ids | Embeddings | Values
INPUTS_IN_WORDS = "Ids(vocab_size), Embeddings(width) or Values(shape)"


@dataclass(frozen=True)
class KeepMask:
    """The padding mask is passed as this argument, shape (B, T); True (or 1) for real tokens.

    Args:
        argument: Name of the argument.
    """

    argument: str

    def value(self, keep: Tensor) -> Tensor:
        """Return the argument: True for real tokens."""
        return keep


@dataclass(frozen=True)
class IgnoreMask:
    """The padding mask is passed as this argument, shape (B, T); True for padding, as in torch.nn.

    Args:
        argument: Name of the argument.
    """

    argument: str

    def value(self, keep: Tensor) -> Tensor:
        """Return the argument: True for padding."""
        return ~keep


Padding = KeepMask | IgnoreMask

Cache: TypeAlias = Any  # of any library; `Caching` describes its methods


def _reorder(cache: Cache, rows: Tensor) -> None:
    """Replace row i by row `rows[i]`."""
    cache.reorder(rows)


def _truncate(cache: Cache, length: int) -> None:
    """Keep the first `length` tokens."""
    cache.crop(length)


@dataclass(frozen=True, kw_only=True)
class Caching:
    """How a cache is created, passed, reordered and truncated.

    Args:
        new: Returns an empty cache.
        argument: Name of the argument that takes the cache.
        reorder: Replaces row i of a cache by row `rows[i]`; None if it is not supported.
        truncate: Keeps the first tokens of a cache; None if it is not supported.
    """

    new: Callable[[], Cache]
    argument: str = "cache"
    reorder: Callable[[Cache, Tensor], None] | None = _reorder
    truncate: Callable[[Cache, int], None] | None = _truncate


@dataclass(frozen=True, kw_only=True)
class CallInputs:
    """Inputs of one call.

    x has shape (B, T, …), the source of an encoder-decoder (B, S, …). `keep` and `source_keep` are True for real
    tokens. The cache contains `start` tokens.

    Args:
        x: Input, (B, T, …).
        keep: True for real tokens of x.
        source: Source of an encoder-decoder, (B, S, …).
        source_keep: True for real tokens of the source.
        cache: Cache of the previous tokens.
        start: Number of tokens in the cache.
    """

    x: Tensor
    keep: Tensor | None = None
    source: Tensor | None = None
    source_keep: Tensor | None = None
    cache: Cache = None
    start: int = 0

    @property
    def length(self) -> int:
        """Tokens per row of x."""
        return self.x.shape[1]

    @property
    def required_source(self) -> Tensor:
        """The source, for modules that cannot be called without one."""
        assert self.source is not None
        return self.source

    def rows(self, rows: Tensor | slice) -> CallInputs:
        """Return the inputs of these rows."""
        tensors = {name: getattr(self, name) for name in ("x", "keep", "source", "source_keep")}
        return replace(self, **{name: tensor[rows] for name, tensor in tensors.items() if tensor is not None})

    def hiding(self, *index: int | slice) -> CallInputs:
        """Return the inputs with the tokens at this index (of the source, if there is one) marked as padding."""
        keep = torch.ones((self.x if self.source is None else self.source).shape[:2], dtype=torch.bool)
        keep[index] = False
        return replace(self, keep=keep) if self.source is None else replace(self, source_keep=keep)


Run = Callable[[Any, CallInputs], object]


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """A module and how it is called. A field that is None or False is unknown or absent, and is not tested.

    Args:
        module: A module or a function.
        name: Name in reports.
        inputs: Kind of its inputs: `Ids`, `Embeddings` or `Values`.
        run: Calls the module: `run(module, inputs)`. Default: `module(x)`, or `module(source, x)`.
        source: Second input of an encoder-decoder.
        mask: Mask of one layer: `causal()` for a language model, `full()` for a bidirectional one.
        layers: Number of layers.
        layer_masks: Additional masks that the layers use in turn.
        positions: False if the module does not encode order.
        scale: Factor of the attention scores, if it is not 1/√d_head.
        takes_padding: Whether `run` passes `keep` (or `source_keep`) to the module.
        left_padding: Whether padding on the left is supported, too.
        takes_target_padding: Whether `run` passes `keep` for the target of an encoder-decoder.
        left_target_padding: Whether padding on the left of the target is supported, too.
        caching: How a cache is created and passed.
        max_len: Most tokens that the module takes.

    Raises:
        ConfigError: `inputs` or `scale` is invalid.

    Example:
        >>> ModuleSpec(GPT(), inputs=Ids(50), mask=causal())
    """

    module: Callable[..., Any] = field(kw_only=False)
    name: str = ""
    inputs: Inputs
    run: Run = None  # type: ignore[assignment]  # default: `direct_run`
    source: Inputs | None = None
    mask: Mask | None = None
    layers: int | None = None
    layer_masks: tuple[Mask, ...] = ()
    positions: bool | None = None
    scale: float | None = None
    takes_padding: bool = False
    left_padding: bool = True
    takes_target_padding: bool = False
    left_target_padding: bool = True
    caching: Caching | None = None
    max_len: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, Inputs):
            raise ConfigError(f"inputs is {self.inputs!r}; expected {INPUTS_IN_WORDS}")
        if self.scale is not None and not (isinstance(self.scale, (int, float)) and self.scale > 0):
            raise ConfigError(f"scale is {self.scale!r}; expected the factor of the scores, a positive number")
        if not self.name:
            object.__setattr__(self, "name", str(getattr(self.module, "__name__", type(self.module).__name__)))
        if self.run is None:
            object.__setattr__(self, "run", direct_run(None, self.caching))

    @property
    def is_sequence(self) -> bool:
        """Whether the input is a sequence."""
        return not isinstance(self.inputs, Values)


def direct_run(padding: Padding | None, caching: Caching | None, target_padding: Padding | None = None) -> Run:
    """Return a function that calls `module(x)` or `module(source, x)` with padding and cache as named arguments."""

    def run(module: Any, batch: CallInputs) -> object:
        masks = [(padding, batch.keep)]
        if batch.source is not None:
            masks = [(padding, batch.source_keep), (target_padding, batch.keep)]
        extra: Kwargs = {p.argument: p.value(keep) for p, keep in masks if p is not None and keep is not None}
        if caching is not None and batch.cache is not None:
            extra[caching.argument] = batch.cache
        return module(*[x for x in (batch.source, batch.x) if x is not None], **extra)

    return run
