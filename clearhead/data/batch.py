"""A batch: what a model is given, what it should answer, and how much each answer counts; and the parts of a task.

Every kind of batch has `labels` and `weights` of the same shape (a weight of zero is padding, or a part that is not
learnt) and knows how to call its kind of model, so one training loop serves all. Padding is told by lengths, which give
the masks.

A task has a name, a training part and a validation part. A part (`Split`) is a numbered list of examples. It says how
long each is and makes a batch of any of them; which ones go together, and in what order, is the business of `Batches`.
Example number r of epoch e is always the same example, whatever batch or process it is asked for in.

Letters: B rows (R where many examples share one), S source tokens, T target tokens, C channels."""

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
    """The fields that every batch has. The counts are plain numbers, so that reading them waits for no device."""

    labels: Int[Tensor, "..."]
    weights: Float[Tensor, "..."]
    n_tokens: int  # real tokens given to the model (pictures: their number)
    n_padded: int  # the same with padding: what is computed
    n_labels: int  # labels of weight above zero: what a mean loss divides by

    @abstractmethod
    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "... V"]:
        """The model's scores for every label, from the inputs of this batch."""

    def custom_loss(self, logits: Float[Tensor, "..."]) -> Float[Tensor, ""] | None:
        """The summed loss, where it is not cross-entropy label by label; `right` then counts the right labels."""
        return None

    def n_correct(self, logits: Float[Tensor, "..."]) -> int:
        """How many labels are right, where there is a loss of its own."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return self.labels.device

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names, always in the same order."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def map(self: AnyBatch, change: Callable[[Tensor], Tensor]) -> AnyBatch:
        """The same batch with every tensor changed alike; its counts stay as they are."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    def to(self: AnyBatch, device: torch.device | str, *, non_blocking: bool = False) -> AnyBatch:
        """The same batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: AnyBatch) -> AnyBatch:
        """The same batch in page-locked memory, from which a copy to a GPU does not hold up the CPU."""
        return self.map(lambda tensor: tensor.pin_memory())

    def with_zero_weight(self: AnyBatch) -> AnyBatch:
        """The same batch with every weight zero: it takes part in a step and adds nothing to it."""
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
        # The target needs no padding mask: its padding is on the right, where causal attention never looks.
        return model(self.source, self.target, source_mask=padding(self.source_lengths))


@dataclass(frozen=True, kw_only=True)
class PackedPairBatch(Batch):
    """Many pairs to a row, end to end. `…_documents` number the pairs of a row; positions count from each's start."""

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
    """Token rows for a decoder; `labels[:, t]` is what should follow `ids[:, t]`.

    Where a row holds several documents, `documents` numbers them, and none attends to another."""

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    labels: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    documents: Int[Tensor, "B T"] | None = None

    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "B T V"]:
        return model(self.ids) if self.documents is None else model(self.ids, mask=documents(self.documents))


@dataclass(frozen=True, kw_only=True)
class ImageBatch(Batch):
    """Normalised pictures and their classes."""

    images: Float[Tensor, "B C height width"]
    labels: Int[Tensor, " B"]
    weights: Float[Tensor, " B"]

    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "B classes"]:
        return model(self.images)


B_co = TypeVar("B_co", bound=Batch, covariant=True)
AnySplit = TypeVar("AnySplit", bound="Split[Any]")


class Split(ABC, Generic[B_co]):
    """Numbered examples of one kind."""

    packable: ClassVar[bool] = False  # whether several can share a row
    is_streaming: ClassVar[bool] = False  # whether batches are read from files on demand, to the CPU
    device_attrs: ClassVar[tuple[str, ...]] = ()  # the attributes that lie where batches are made

    @abstractmethod
    def __len__(self) -> int:
        """How many examples an epoch has."""

    @abstractmethod
    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        """The tokens of each example, a column for each side that is padded by itself."""

    @abstractmethod
    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> B_co:
        """The examples of these numbers side by side, padded to a multiple of `multiple` tokens."""

    def labels_of(self, rows: Int[Tensor, " B"]) -> Int[Tensor, "..."]:
        """What the examples of these numbers should be answered with: data are told apart by it."""
        return self.batch(rows).labels

    def packed(self, rows: Int[Tensor, "R most"], width: int, *, epoch: int = 0) -> B_co:
        """Rows of `width` tokens a side, each with the examples of these numbers end to end (−1 is no example).

        Only where `packs` says so: the model has to be told which tokens belong together."""
        raise NotImplementedError

    def to(self: AnySplit, device: torch.device | str) -> AnySplit:
        """The same examples, with batches made on a device: worth it wherever the data fits there."""
        other = copy.copy(self)
        for name in self.device_attrs:
            setattr(other, name, getattr(self, name).to(device))
        return other


@runtime_checkable
class Task(Protocol):
    """What a training loop needs to know of its data."""

    name: str

    @property
    def train(self) -> Split[Batch]:
        """The part to train on."""

    @property
    def validation(self) -> Split[Batch]:
        """The part to measure on."""
