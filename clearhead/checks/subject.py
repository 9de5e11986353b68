"""What is checked, and how it is called.

The properties know nothing of any library: they hand a `Batch` to a `Subject`, which knows how its module wants it.
A `Subject` is guessed for the models of this project, of transformers, torch.nn and timm (`guess.py`), or told by
the caller.

    B batch   T tokens   S source tokens   M model width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ConfigError, DtypeError
from clearhead.masks import Mask
from clearhead.values import whole


@dataclass(frozen=True)
class Ids:
    """The module reads token numbers, (B, T), from 0 to `vocab_size` − 1."""

    vocab_size: int

    def __post_init__(self) -> None:
        whole(self.vocab_size, "vocab_size", least=1)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Token numbers of shape (batch, length)."""
        return torch.randint(self.vocab_size, (batch, length), generator=generator)


@dataclass(frozen=True)
class Embeddings:
    """The module reads vectors, (B, T, `width`)."""

    width: int

    def __post_init__(self) -> None:
        whole(self.width, "width", least=1)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Normal numbers of shape (batch, length, width)."""
        return torch.randn(batch, length, self.width, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Values:
    """The module reads one block of numbers, (B, *`shape`), that is no sequence: a picture, or a row of features."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for size in self.shape:
            whole(size, "a size of shape", least=1)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Normal numbers of shape (batch, *shape)."""
        return torch.randn(batch, *self.shape, generator=generator, dtype=torch.float64)


Inputs = Ids | Embeddings | Values
INPUTS_IN_WORDS = "Ids(vocab_size), Embeddings(width) or Values(shape)"


@dataclass(frozen=True)
class TrueIsReal:
    """Padding is told by this argument, (B, T): True (or 1) where a token is real."""

    argument: str

    def value(self, keep: Tensor) -> Tensor:
        """The argument for these tokens: True where one is real."""
        return keep


@dataclass(frozen=True)
class TrueIsHidden:
    """Padding is told by this argument, (B, T): True where a token is padding, as torch.nn has it."""

    argument: str

    def value(self, keep: Tensor) -> Tensor:
        """The argument for these tokens: True where one is padding."""
        return ~keep


Padding = TrueIsReal | TrueIsHidden


def _reorder(cache: Any, rows: Tensor) -> None:
    """Row i goes on from what row `rows[i]` was."""
    cache.reorder(rows)


def _truncate(cache: Any, length: int) -> None:
    """Forgets all but the first `length` tokens."""
    cache.truncate(length)


@dataclass(frozen=True, kw_only=True)
class Caching:
    """How a cache is made and handled. It is passed as `argument`; `truncate=None`: it cannot forget."""

    new: Callable[[], Any]
    argument: str = "cache"
    reorder: Callable[[Any, Tensor], None] | None = _reorder
    truncate: Callable[[Any, int], None] | None = _truncate


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One call: what goes in, x (B, T, …) and an encoder-decoder's source (B, S, …), which of it is real (True), and
    the cache with the `start` tokens that it has seen."""

    x: Tensor
    keep: Tensor | None = None
    source: Tensor | None = None
    source_keep: Tensor | None = None
    cache: Any = None
    start: int = 0

    @property
    def length(self) -> int:
        """How many tokens each row of x has."""
        return self.x.shape[1]

    def rows(self, rows: Tensor | slice) -> Batch:
        """The same for these rows alone."""
        whole = {name: getattr(self, name) for name in ("x", "keep", "source", "source_keep")}
        return replace(self, **{name: tensor[rows] for name, tensor in whole.items() if tensor is not None})

    def hiding(self, *place: Any) -> Batch:
        """The same with the tokens at this place (of its source, where it has one) called padding."""
        keep = torch.ones((self.x if self.source is None else self.source).shape[:2], dtype=torch.bool)
        keep[place] = False
        return replace(self, keep=keep) if self.source is None else replace(self, source_keep=keep)


Run = Callable[[Any, Batch], Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module and how it is called; what is None or False is unknown or not there, and is not tested.

        Subject(GPT(), inputs=Ids(50), sees=causal())

    `run(module, batch)` calls the module; by default it is called as `module(x)`, or `module(source, x)`. `source`
    describes the second input of an encoder-decoder. `sees` is the mask of one layer, `causal()` for a language model
    and `full()` for one that may look ahead; `in_turn` are masks that its `layers` take in turn besides.
    `positions=False` says that the module knows no order, `scale` what its scores are multiplied by where that is not
    1/√d_head. `pads`: `run` passes `batch.keep` (or `batch.source_keep`) on; `left`: padding on the left is meant to
    work too. `pads_target` and `left_target` say the same of an encoder-decoder's target (padding: `batch.keep`)."""

    module: Callable[..., Any] = field(kw_only=False)
    name: str = ""
    inputs: Inputs
    run: Run = None  # type: ignore[assignment]  # `direct_run`, where nobody said how it is called
    source: Inputs | None = None
    sees: Mask | None = None
    layers: int | None = None
    in_turn: tuple[Mask, ...] = ()
    positions: bool | None = None
    scale: float | None = None
    pads: bool = False
    left: bool = True
    pads_target: bool = False
    left_target: bool = True
    caching: Caching | None = None
    max_len: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, Inputs):
            raise ConfigError(f"inputs is {self.inputs!r}; expected {INPUTS_IN_WORDS}")
        if self.scale is not None and not (isinstance(self.scale, (int, float)) and self.scale > 0):
            raise ConfigError(f"scale is {self.scale!r}; expected what scores are multiplied by, a number above 0")
        if not self.name:
            object.__setattr__(self, "name", str(getattr(self.module, "__name__", type(self.module).__name__)))
        if self.run is None:
            object.__setattr__(self, "run", direct_run(None, self.caching))

    @property
    def is_sequence(self) -> bool:
        """Whether its input is tokens in a row."""
        return not isinstance(self.inputs, Values)


def direct_run(padding: Padding | None, caching: Caching | None, target_padding: Padding | None = None) -> Run:
    """Calls `module(x)` or `module(source, x)`, with padding and cache under the names that were given."""

    def run(module: Any, batch: Batch) -> Any:
        told = [(padding, batch.keep)]
        if batch.source is not None:
            told = [(padding, batch.source_keep), (target_padding, batch.keep)]
        extra: dict[str, Any] = {p.argument: p.value(keep) for p, keep in told if p is not None and keep is not None}
        if caching is not None and batch.cache is not None:
            extra[caching.argument] = batch.cache
        return module(*[x for x in (batch.source, batch.x) if x is not None], **extra)

    return run


def tensor_of(output: Any) -> Tensor:
    """The one tensor that is meant, out of what modules return: a tensor, a tuple, a dict, an output object."""
    for name in ("logits", "last_hidden_state"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(output, Tensor):
        return output
    parts = list(output.values()) if isinstance(output, Mapping) else output
    for part in parts if isinstance(parts, (tuple, list)) else ():
        if isinstance(part, Tensor) and part.is_floating_point():
            return part
    raise DtypeError(
        f"the module returned a {type(output).__name__}; expected a tensor, or a tuple, dict or object that holds one: "
        "give run=, a function of (module, batch) that returns it"
    )


def all_tensors(output: Any) -> list[Tensor]:
    """Every floating tensor in what a module returned: a loss may be made of any of them."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in all_tensors(part)]
    return []
