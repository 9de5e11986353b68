"""Digit classification: small grayscale images of ten classes.

Images are stored as grayscale bytes (see `image_files.py`); in a batch they are float32 from 0 to 1, augmented in
training, and normalized with the statistics of the training data (see `image_transforms.py`). An image's augmentation
depends on the seed, the epoch and the image, but not on the batch.

    B images   C channels"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from clearhead._core import counter_rng
from clearhead._core.shapes import Int
from clearhead.data.batch import ImageBatch, Split
from clearhead.data.image_files import Images, load_images
from clearhead.data.image_transforms import Augmentation, DatasetNormalize, Normalization

_AUGMENT = 401


class ImageSplit(Split[ImageBatch]):
    """Images and their classes, with normalization and augmentation.

    Args:
        images: The images.
        normalize: Normalization of pixel values.
        augment: Random changes of training images.
        seed: Seed of the random changes.
    """

    device_attrs = ("pixels", "labels")

    def __init__(
        self, images: Images, normalize: Normalization, *, augment: Sequence[Augmentation] = (), seed: int = 0
    ) -> None:
        self.pixels = images.pixels
        self.labels = images.labels
        self.normalize = normalize
        self.augment = tuple(augment)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        return torch.ones(len(self), 1, dtype=torch.int64)

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> ImageBatch:
        indices = rows.to(self.labels.device)
        images = self.pixels[indices][:, None].to(torch.float32) / 255
        for number, change in enumerate(self.augment):
            columns = torch.arange(change.n_uniforms, device=indices.device)
            images = change(images, counter_rng.uniform(_AUGMENT, self.seed, epoch, number, indices[:, None], columns))
        n = len(rows)
        ones = torch.ones(len(rows), device=indices.device)
        images = self.normalize(images)
        labels = self.labels[indices]
        return ImageBatch(images=images, labels=labels, weights=ones, n_tokens=n, n_padded=n, n_labels=n)


class DigitClassification:
    """The task of classifying images of digits."""

    name = "digits"
    n_classes = 10

    def __init__(self, train: ImageSplit, validation: ImageSplit) -> None:
        self.train = train
        self.validation = validation

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, width = self.train.pixels.shape[1:]
        return height, width

    @property
    def normalize(self) -> Normalization:
        """Normalization of the images."""
        return self.train.normalize

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        *,
        normalize: Normalization | None = None,
        augment: Sequence[Augmentation] = (),
        seed: int = 0,
    ) -> DigitClassification:
        """Load SVHN's .mat files, an npz, idx files, or scikit-learn's 8×8 digits.

        Args:
            path: The file or folder; None: scikit-learn's digits.
            normalize: By default the mean and standard deviation of the training images.
            augment: Augmentations of the training images.
            seed: Seed of the augmentations.

        Raises:
            DataError: The content is invalid.
            StorageError: A file is missing or cannot be read.
        """
        train, validation = load_images(path)
        choice = normalize if normalize is not None else DatasetNormalize.of(train.pixels)
        return cls(ImageSplit(train, choice, augment=augment, seed=seed), ImageSplit(validation, choice))
