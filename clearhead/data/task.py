"""The shape that every task has: a name, a training part and a validation part.

A part (`Split`) is a numbered list of examples. It says how long each is and makes a batch of any of them; which ones
go together, and in what order, is the business of `Batches`. Example number r of epoch e is always the same example,
whatever batch or process it is asked for in."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from clearhead._shapes import Int
from clearhead.data.batch import Batch

B_co = TypeVar("B_co", bound=Batch, covariant=True)
AnySplit = TypeVar("AnySplit", bound="Split[Any]")


class Split(ABC, Generic[B_co]):
    """Numbered examples of one kind."""

    packs: ClassVar[bool] = False  # whether several can share a row
    reads: ClassVar[bool] = False  # whether batches are read from files as they are asked for, and stay on the CPU
    moves: ClassVar[tuple[str, ...]] = ()  # the attributes that lie where batches are made

    @abstractmethod
    def __len__(self) -> int:
        """How many examples an epoch has."""

    @abstractmethod
    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        """The tokens of each example, a column for each side that is padded by itself."""

    @abstractmethod
    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> B_co:
        """The examples of these numbers side by side, padded to a multiple of `multiple` tokens."""

    def answers(self, rows: Int[Tensor, " B"]) -> Int[Tensor, "..."]:
        """What the examples of these numbers should be answered with: data are told apart by it."""
        return self.batch(rows).labels

    def packed(self, rows: Int[Tensor, "R most"], width: int, *, epoch: int = 0) -> B_co:
        """Rows of `width` tokens a side, each with the examples of these numbers end to end (−1 is no example).

        Only where `packs` says so: the model has to be told which tokens belong together."""
        raise NotImplementedError

    def to(self: AnySplit, device: torch.device | str) -> AnySplit:
        """The same examples, with batches made on a device: worth it wherever the data fits there."""
        other = copy.copy(self)
        for name in self.moves:
            setattr(other, name, getattr(self, name).to(device))
        return other


@runtime_checkable
class Task(Protocol):
    """What a training loop needs to know of its data."""

    name: str

    @property
    def train(self) -> Split[Batch]:
        """The part to train on."""
        ...

    @property
    def validation(self) -> Split[Batch]:
        """The part to measure on."""
        ...
