"""Train on a `torch.utils.data.Dataset` or the data of a `DataLoader`.

`DatasetSplit` makes batches of a map-style dataset, and `DatasetTask` joins a training and a validation split to a task
for `clearhead.training.Trainer`. Order and position in the data are those of the trainer, so that runs resume; a
`DataLoader` therefore contributes its dataset and its `collate_fn`, but not its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from clearhead._core.shapes import Float, Int
from clearhead.data.batch import B_co, Batch, Split
from clearhead.data.tokenizers.base import Tokenizer
from clearhead.errors import DataError

Example: TypeAlias = Any  # whatever the user's dataset contains


@dataclass(frozen=True, kw_only=True)
class InputBatch(Batch):
    """Inputs of any module that takes one tensor, and a class label for each logit vector that it returns."""

    inputs: Float[Tensor, "B ..."] | Int[Tensor, "B ..."]
    labels: Int[Tensor, "B ..."]
    weights: Float[Tensor, "B ..."]

    @classmethod
    def of(cls, inputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> InputBatch:
        """Return a batch; `weights` are 1 by default, and 0 excludes a label from the loss."""
        weights = torch.ones(labels.shape) if weights is None else weights
        return cls(
            inputs=inputs,
            labels=labels,
            weights=weights,
            n_tokens=labels.numel(),
            n_padded=labels.numel(),
            n_labels=int((weights > 0).sum()),
        )

    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "B ... V"]:
        return model(self.inputs)


@runtime_checkable
class MapDataset(Protocol):
    """A map-style dataset: `len(dataset)` and `dataset[i]`."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int, /) -> Example:
        """Return an example."""


def collate_pairs(examples: Sequence[Example]) -> Batch:
    """Stack (inputs, label) pairs to an `InputBatch`; the inputs must have one shape."""
    inputs, labels = default_collate(list(examples))
    return InputBatch.of(inputs, labels)


class DatasetSplit(Split[B_co], Generic[B_co]):
    """The examples of a map-style dataset.

        DatasetSplit(MNIST("data", transform=ToTensor()))  # (image, label) pairs
        DatasetSplit(dataset, collate=my_collate, lengths=[len(text) for text in texts])

    Args:
        dataset: The dataset.
        collate: Function from a list of examples to a `Batch`; by default it stacks (inputs, label) pairs.
        lengths: Number of tokens of each example, for `TokenBudget`; by default 1 each, for examples of one shape.
        background: Whether a thread reads batches ahead. Leave it off if examples use random numbers: only then does a
            resumed run draw the same ones.

    Raises:
        DataError: The dataset has no length, or `lengths` has another one.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate: Callable[[list[Example]], B_co] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        background: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            kind = type(dataset).__name__
            raise DataError(f"{kind} has no length; expected a map-style dataset with __len__ and __getitem__")
        sizes = [1] * len(dataset) if lengths is None else list(lengths)
        if len(sizes) != len(dataset):
            raise DataError(f"lengths has {len(sizes):,} items, expected one for each of the {len(dataset):,} examples")
        self.dataset = dataset
        self.is_streaming = background
        self._collate: Callable[[list[Example]], Any] = collate_pairs if collate is None else collate
        self._lengths = torch.tensor(sizes, dtype=torch.int64)[:, None]

    def __len__(self) -> int:
        return len(self.dataset)

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        return self._lengths

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> B_co:
        batch: B_co = self._collate([self.dataset[row] for row in rows.tolist()])
        _require_batch(batch)
        return batch

    @classmethod
    def from_loader(
        cls,
        loader: DataLoader[Example],
        to_batch: Callable[..., B_co] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        background: bool = False,
    ) -> DatasetSplit[B_co]:
        """Return the examples of a `DataLoader`, collated by its `collate_fn`.

        Args:
            loader: The loader; its batch size, sampler and workers are not used.
            to_batch: Function from what the loader yields to a `Batch`, called with the items of a tuple as separate
                arguments; by default `InputBatch.of`.
            lengths: As in `DatasetSplit`.
            background: As in `DatasetSplit`.
        """
        convert: Callable[..., Batch] = InputBatch.of if to_batch is None else to_batch

        def collate(examples: list[Example]) -> Batch:
            collated = loader.collate_fn(examples)
            return convert(*collated) if isinstance(collated, tuple | list) else convert(collated)

        make: Any = cls
        split: DatasetSplit[B_co] = make(loader.dataset, collate, lengths=lengths, background=background)
        return split


def _require_batch(batch: object) -> None:
    if not isinstance(batch, Batch):
        kind = type(batch).__name__
        raise DataError(f"collate returned a {kind}; expected a Batch, such as InputBatch.of(inputs, labels)")


@dataclass
class DatasetTask:
    """Training and validation data for `clearhead.training.Trainer`.

        DatasetTask(train=DatasetSplit(train_set), validation=DatasetSplit(valid_set), name="mnist")

    Attributes:
        train: The training split.
        validation: The validation split.
        name: Name of the task.
        tokenizer: Tokenizer that is saved with the model, if any.
    """

    train: Split[Batch]
    validation: Split[Batch]
    name: str = "custom"
    tokenizer: Tokenizer | None = None
