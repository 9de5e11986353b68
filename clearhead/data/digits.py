"""Pictures of digits: say which of ten classes a small grey picture shows.

Pictures stay bytes until a batch is made; there they become float32 from 0 to 1, are changed a little in training where
that is asked for, and are normalised the way the training part says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.data import draws
from clearhead.data.augment import Augmentation, Normalisation, PerSet
from clearhead.data.batch import ImageBatch
from clearhead.data.images import Images, load_images
from clearhead.data.task import Split

_AUGMENT = 401


def prepare(pixels: Tensor, normalise: Normalisation) -> Float[Tensor, "B 1 height width"]:
    """Pictures (B, height, width) of bytes as a model wants them."""
    return normalise(pixels[:, None].to(torch.float32) / 255)


class ImageSplit(Split[ImageBatch]):
    """Pictures and their classes, with what is done to them."""

    moves = ("pixels", "labels")

    def __init__(
        self, images: Images, normalise: Normalisation, *, augment: Sequence[Augmentation] = (), seed: int = 0
    ) -> None:
        self.pixels, self.labels = images.pixels, images.labels
        self.normalise, self.augment, self.seed = normalise, tuple(augment), seed

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        return torch.ones(len(self), 1, dtype=torch.int64)

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> ImageBatch:
        there = rows.to(self.labels.device)
        images = self.pixels[there][:, None].to(torch.float32) / 255
        for number, change in enumerate(self.augment):
            columns = torch.arange(change.n_draws, device=there.device)
            images = change(images, draws.uniform(_AUGMENT, self.seed, epoch, number, there[:, None], columns))
        n, ones = len(rows), torch.ones(len(rows), device=there.device)
        images, labels = self.normalise(images), self.labels[there]
        return ImageBatch(images=images, labels=labels, weights=ones, n_tokens=n, n_padded=n, n_labels=n)


class Digits:
    """The task: name the digit in a picture."""

    name = "digits"
    n_classes = 10

    def __init__(self, train: ImageSplit, validation: ImageSplit) -> None:
        self.train, self.validation = train, validation

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of a picture."""
        height, width = self.train.pixels.shape[1:]
        return height, width

    @property
    def normalise(self) -> Normalisation:
        """How pictures are shifted and scaled before the model sees them."""
        return self.train.normalise

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        *,
        normalise: Normalisation | None = None,
        augment: Sequence[Augmentation] = (),
        seed: int = 0,
    ) -> Digits:
        """From SVHN's .mat files, an npz, idx files, or (without a path) scikit-learn's 8×8 digits.

        Without a choice, pictures are normalised by the mean and spread of the training part. Only it is augmented."""
        train, validation = load_images(path)
        choice = normalise if normalise is not None else PerSet.of(train.pixels)
        return cls(ImageSplit(train, choice, augment=augment, seed=seed), ImageSplit(validation, choice))
