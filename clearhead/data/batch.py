"""Batches, splits and tasks: the interface between data and the training loop.

Every kind of batch has `labels` and `weights` of the same shape (weight 0: padding, or tokens without a loss) and can
call its kind of model, so one training loop serves all tasks. Padding is described by lengths, from which masks are
made.

A task has a name, a training split and a validation split. A `Split` is an indexed collection of examples, which
returns their lengths and makes batches of any of them; `Batches` chooses the examples of each batch and their order.
Example r of epoch e is always the same, independent of the batch and the process.

    B rows   R rows with several examples each   S source tokens   T target tokens   C channels"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from clearhead._core.shapes import Float, Int
from clearhead.masks import allow, documents, padding

AnyBatch = TypeVar("AnyBatch", bound="Batch")


@dataclass(frozen=True, kw_only=True)
class Batch(ABC):
    """Fields of every batch. Counts are Python integers, so that reading them does not synchronize a device."""

    labels: Int[Tensor, "..."]
    weights: Float[Tensor, "..."]
    n_tokens: int  # input tokens without padding (for images: their number)
    n_padded: int  # input tokens with padding
    n_labels: int  # labels with positive weight: the divisor of a mean loss

    @abstractmethod
    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "... V"]:
        """Call the model on the inputs of this batch and return its logits."""

    def custom_loss(self, logits: Float[Tensor, "..."]) -> Float[Tensor, ""] | None:
        """Return the summed loss if it is not the cross-entropy of each label, else None."""
        return None

    def n_correct(self, logits: Float[Tensor, "..."]) -> int:
        """Return the number of correct labels; required if the batch has a custom loss."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.labels.device

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, always in the same order."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def map(self: AnyBatch, function: Callable[[Tensor], Tensor]) -> AnyBatch:
        """Return the batch with a function applied to every tensor; the counts do not change."""
        tensors: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **tensors)

    def to(self: AnyBatch, device: torch.device | str, *, non_blocking: bool = False) -> AnyBatch:
        """Return the batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: AnyBatch) -> AnyBatch:
        """Return the batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return self.map(lambda tensor: tensor.pin_memory())

    def with_zero_weight(self: AnyBatch) -> AnyBatch:
        """Return the batch with all weights zero, so that it does not contribute to the loss."""
        return replace(self, weights=torch.zeros_like(self.weights), n_tokens=0, n_labels=0)


@dataclass(frozen=True, kw_only=True)
class PairBatch(Batch):
    """Source and target sentences, for an encoder-decoder. `target` starts with <bos>, `labels` end with <eos>."""

    source: Int[Tensor, "B S"]
    source_lengths: Int[Tensor, " B"]
    target: Int[Tensor, "B T"]
    target_lengths: Int[Tensor, " B"]
    labels: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]

    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "B T V"]:
        # The target needs no padding mask: its padding is on the right, which causal attention excludes.
        return model(self.source, self.target, source_mask=padding(self.source_lengths))


@dataclass(frozen=True, kw_only=True)
class PackedPairBatch(Batch):
    """Several pairs packed into each row. `…_documents` number the pairs; positions start at 0 in each pair."""

    source: Int[Tensor, "R S"]
    source_documents: Int[Tensor, "R S"]
    source_positions: Int[Tensor, "R S"]
    target: Int[Tensor, "R T"]
    target_documents: Int[Tensor, "R T"]
    target_positions: Int[Tensor, "R T"]
    labels: Int[Tensor, "R T"]
    weights: Float[Tensor, "R T"]

    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "R T V"]:
        return model(
            self.source,
            self.target,
            source_mask=documents(self.source_documents),
            target_mask=documents(self.target_documents),
            memory_mask=allow(self.target_documents[:, None, :, None] == self.source_documents[:, None, None, :]),
            source_positions=self.source_positions,
            target_positions=self.target_positions,
        )


@dataclass(frozen=True, kw_only=True)
class TokenBatch(Batch):
    """Token rows for a decoder; `labels[:, t]` is the token after `ids[:, t]`.

    If rows contain several documents, `documents` numbers them, and tokens attend only to their own document."""

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    labels: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    documents: Int[Tensor, "B T"] | None = None

    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "B T V"]:
        return model(self.ids) if self.documents is None else model(self.ids, mask=documents(self.documents))


@dataclass(frozen=True, kw_only=True)
class ImageBatch(Batch):
    """Normalized images and their classes."""

    images: Float[Tensor, "B C height width"]
    labels: Int[Tensor, " B"]
    weights: Float[Tensor, " B"]

    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "B classes"]:
        return model(self.images)


B_co = TypeVar("B_co", bound=Batch, covariant=True)
AnySplit = TypeVar("AnySplit", bound="Split[Any]")


class Split(ABC, Generic[B_co]):
    """An indexed collection of examples."""

    packable: ClassVar[bool] = False  # whether several examples can share a row
    is_streaming: bool = False  # whether batches are read from files on demand, to the CPU
    device_attrs: ClassVar[tuple[str, ...]] = ()  # tensor attributes on the device on which batches are made

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples per epoch."""

    @abstractmethod
    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        """Return the number of tokens of each example, one column per side (source, target)."""

    @abstractmethod
    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> B_co:
        """Return a batch of the given examples, padded to a multiple of `multiple` tokens."""

    def labels_of(self, rows: Int[Tensor, " B"]) -> Int[Tensor, "..."]:
        """Return the labels of the given examples; the fingerprint of the data uses them."""
        return self.batch(rows).labels

    def packed(self, rows: Int[Tensor, "R most"], width: int, *, epoch: int = 0) -> B_co:
        """Return a batch whose rows contain several examples each, in `width` tokens per side.

        Args:
            rows: Example indices of each row; −1 marks unused entries.
            width: Tokens per row and side.
            epoch: Epoch of the examples.

        Raises:
            NotImplementedError: The split is not `packable`.
        """
        raise NotImplementedError

    def to(self: AnySplit, device: torch.device | str) -> AnySplit:
        """Return the split with its data on a device, so that batches are made there."""
        other = copy.copy(self)
        for name in self.device_attrs:
            setattr(other, name, getattr(self, name).to(device))
        return other


@runtime_checkable
class Task(Protocol):
    """Training and validation data of a training loop."""

    name: str

    @property
    def train(self) -> Split[Batch]:
        """The training split."""

    @property
    def validation(self) -> Split[Batch]:
        """The validation split."""
