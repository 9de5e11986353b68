"""Digit classification: small grayscale images of ten classes.

Supported files are SVHN's cropped digits (`train_32x32.mat`, `test_32x32.mat`), an npz with `x_train y_train x_val
y_val` (also inside xz), the idx files of MNIST and Fashion-MNIST, and the 8×8 digits of scikit-learn. Images are stored
as grayscale bytes; in a batch they are float32 from 0 to 1, augmented in training, and normalized with the statistics
of the training data.

Augmentations receive uniform random numbers, one row per image, so an image's augmentation depends on the seed, the
epoch and the image, but not on the batch.

    B images   C channels"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core import counter_rng
from clearhead._core.json_types import JSONObject
from clearhead._core.shapes import Float, Int
from clearhead._core.validation import DropoutRate, NonNegativeFloat, NonNegativeInt, PositiveFloat, Probability
from clearhead.config import Validated, decode_variant, encode
from clearhead.data import files
from clearhead.data.batch import ImageBatch, Split
from clearhead.errors import DataError, StorageError, optional_dependency

if TYPE_CHECKING:
    import numpy as np

ImageTensor: TypeAlias = Float[Tensor, "B C height width"]


@dataclass(frozen=True)
class RandomShift(Validated):
    """Shift images at random in both directions; the border is repeated.

    Args:
        pixels: Largest shift.
    """

    pixels: NonNegativeInt = 2
    n_uniforms: ClassVar[int] = 2

    def __call__(self, images: ImageTensor, uniforms: Float[Tensor, "B n"]) -> ImageTensor:
        by = (uniforms * (2 * self.pixels + 1)).long() - self.pixels  # (B, 2) rows, columns
        height, width = images.shape[-2:]
        rows = (torch.arange(height, device=images.device) - by[:, :1]).clamp(0, height - 1)  # (B, height)
        columns = (torch.arange(width, device=images.device) - by[:, 1:]).clamp(0, width - 1)  # (B, width)
        batch = torch.arange(len(images), device=images.device)[:, None, None]
        return images.transpose(0, 1)[:, batch, rows[:, :, None], columns[:, None, :]].transpose(0, 1)


@dataclass(frozen=True)
class RandomAffine(Validated):
    """Rotate, scale and shift images at random; the border is repeated.

    Args:
        shift: Largest shift, as a fraction of the size.
        scale: The factor is between 1 − scale and 1 + scale.
        degrees: Largest rotation.
    """

    shift: NonNegativeFloat = 0.06
    scale: DropoutRate = 0.1
    degrees: NonNegativeFloat = 0.0
    n_uniforms: ClassVar[int] = 4

    def __call__(self, images: ImageTensor, uniforms: Float[Tensor, "B n"]) -> ImageTensor:
        x, y, size, turn = (2 * uniforms - 1).unbind(1)  # each (B,) from −1 to 1
        angle = turn * math.radians(self.degrees)
        # The grid maps output pixels to input positions, so a larger image needs a smaller step.
        step = 1 / (1 + size * self.scale)
        cos, sin = angle.cos() * step, angle.sin() * step
        across = torch.stack([cos, -sin, 2 * self.shift * x], dim=1)
        down = torch.stack([sin, cos, 2 * self.shift * y], dim=1)
        grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)


@dataclass(frozen=True)
class RandomContrast(Validated):
    """Scale the contrast of images at random, and invert some.

    Args:
        amount: The factor is between 1 − amount and 1 + amount.
        invert: Share of inverted images.
    """

    amount: DropoutRate = 0.2
    invert: Probability = 0.0  # share of inverted images
    n_uniforms: ClassVar[int] = 2

    def __call__(self, images: ImageTensor, uniforms: Float[Tensor, "B n"]) -> ImageTensor:
        mean = images.mean(dim=(-3, -2, -1), keepdim=True)
        factor = 1 + (2 * uniforms[:, 0] - 1) * self.amount
        factor = torch.where(uniforms[:, 1] < self.invert, -factor, factor)
        return mean + (images - mean) * factor[:, None, None, None]


Augmentation = RandomShift | RandomAffine | RandomContrast


@dataclass(frozen=True)
class DatasetNormalize(Validated):
    """Subtract the mean of the training images and divide by their standard deviation.

    Args:
        mean: Mean of the training images, scaled to 0 … 1.
        std: Their standard deviation.
    """

    mean: float
    std: PositiveFloat

    @classmethod
    def of(cls, pixels: Tensor) -> DatasetNormalize:
        """Compute mean and standard deviation exactly from the counts of the 256 byte values."""
        counts = torch.bincount(pixels.flatten().to(torch.int64), minlength=256).to(torch.float64)
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = float((counts * values).sum() / counts.sum())
        variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
        return cls(mean, math.sqrt(variance) or 1.0)  # images with a single value have no deviation

    def __call__(self, images: Float[Tensor, "... height width"]) -> Float[Tensor, "... height width"]:
        return (images - self.mean) / self.std


@dataclass(frozen=True)
class ImageNormalize(Validated):
    """Normalize each image to mean 0 and standard deviation 1.

    Args:
        floor: Smallest divisor.
    """

    floor: PositiveFloat = 0.02

    def __call__(self, images: Float[Tensor, "... height width"]) -> Float[Tensor, "... height width"]:
        std, mean = torch.std_mean(images, dim=(-2, -1), correction=0, keepdim=True)
        return (images - mean) / std.clamp(min=self.floor)


Normalization = DatasetNormalize | ImageNormalize


def normalization_to_dict(choice: Normalization) -> JSONObject:
    """Return a normalization as plain values, to be stored with the model."""
    return encode(choice)


def normalization_from_dict(fields: JSONObject) -> Normalization:
    """Return the normalization that `normalization_to_dict` wrote."""
    return decode_variant(fields, (DatasetNormalize, ImageNormalize), "normalization")


# ---------------------------------------------------------------------- files

_MAT_NAMES = ("train_32x32.mat", "test_32x32.mat")
_IDX_NAMES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_NPZ_NAMES = ("x_train", "y_train", "x_val", "y_val")
_N_CLASSES = 10


@dataclass(frozen=True)
class Images:
    """Grayscale images, 0 to 255, and their classes, 0 to 9.

    Args:
        pixels: Values from 0 to 255, (N, height, width), uint8.
        labels: Classes from 0 to 9.
        source: Name in messages.
    """

    pixels: Tensor  # (N, height, width) uint8
    labels: Int[Tensor, " N"]
    source: str = "pictures"

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3 or self.pixels.dtype != torch.uint8:
            raise DataError(
                f"{self.source}: pictures of shape {tuple(self.pixels.shape)} and {self.pixels.dtype}, "
                "expected (number, height, width) of uint8"
            )
        if self.labels.shape != self.pixels.shape[:1]:
            raise DataError(
                f"{self.source}: {len(self.pixels):,} pictures but labels of shape {tuple(self.labels.shape)}"
            )
        if not len(self.labels):
            raise DataError(f"{self.source}: no pictures, expected at least one")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= _N_CLASSES:
            raise DataError(f"{self.source}: labels from {low} to {high}, expected 0 to {_N_CLASSES - 1}")

    def __len__(self) -> int:
        return len(self.labels)


def to_grayscale(rgb: Tensor) -> Tensor:
    """Convert RGB (…, 3) uint8 to (…) uint8 by ITU-R 601 (0.299, 0.587, 0.114), in fixed point."""
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32)
    return (((rgb.to(torch.int32) * weights).sum(-1, dtype=torch.int32) + (1 << 15)) >> 16).to(torch.uint8)


def read_mat(path: Path) -> Images:
    """Read SVHN's cropped digits: `X` (32, 32, 3, N) and `y` (N, 1), in which label 10 is the digit 0."""
    with optional_dependency("reading .mat files needs scipy: pip install 'clearhead[data]'"):
        from scipy.io import loadmat
    if not path.is_file():
        raise StorageError(f"file {path} does not exist: expected SVHN's {' and '.join(_MAT_NAMES)}")
    try:
        content = loadmat(path, variable_names=("X", "y"))
    except Exception as error:  # scipy raises various exceptions for invalid files
        raise StorageError(f"{path} cannot be read as a .mat file ({error}): fetch it again") from error
    if not content.keys() >= {"X", "y"}:
        raise DataError(f"{path} lacks X or y: expected the cropped digits (32×32), not the full pictures")
    X, y = (_tensor(content[name], path) for name in ("X", "y"))
    if X.ndim != 4 or X.shape[2] != 3 or X.dtype != torch.uint8:
        raise DataError(f"{path}: X has shape {tuple(X.shape)} and {X.dtype}, expected (32, 32, 3, N) of uint8")
    labels = y.flatten().to(torch.int64)
    return Images(to_grayscale(X.permute(3, 0, 1, 2)), labels.where(labels != _N_CLASSES, 0), path.name)


def read_npz(path: Path) -> tuple[Images, Images]:
    """Read training and validation images from `x_train y_train x_val y_val`."""
    import numpy

    with files.open_bytes(path) if path.suffix in (".xz", ".gz") else files.require_file(path).open("rb") as file:
        content = file.read()
    try:
        with numpy.load(io.BytesIO(content), allow_pickle=False) as arrays:
            loaded = {name: arrays[name] for name in _NPZ_NAMES if name in arrays}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError, MemoryError) as error:
        raise StorageError(f"{path} cannot be read as npz ({error}): fetch it again") from error
    if len(loaded) != len(_NPZ_NAMES):
        raise DataError(f"{path} has {', '.join(loaded) or 'none'} of the arrays it should: {', '.join(_NPZ_NAMES)}")
    return _both([_tensor(loaded[name], path) for name in _NPZ_NAMES], f"{path.name}, train", f"{path.name}, val")


def _both(arrays: Sequence[Tensor], train: str, validation: str) -> tuple[Images, Images]:
    """Return training and validation images from four arrays."""
    x_train, y_train, x_val, y_val = arrays
    return Images(x_train, y_train.to(torch.int64), train), Images(x_val, y_val.to(torch.int64), validation)


def _tensor(array: np.ndarray, path: Path) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise DataError(f"{path} holds an array of {array.dtype}, expected numbers") from error


def read_idx(path: Path) -> Tensor:
    """Read an idx file, possibly gzipped: 00 00, the type (08: bytes), the rank, the sizes, the values."""
    with files.open_bytes(path) as file:
        content = file.read()
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} does not start as an idx file of bytes: expected 00 00 08, got {content[:3].hex(' ')}")
    rank = content[3]
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank)]
    values = bytearray(content[4 + 4 * rank :])
    if len(values) != (expected := math.prod(sizes)):
        raise StorageError(f"{path} has {len(values):,} values, its header says {expected:,}: fetch it again")
    return torch.frombuffer(values, dtype=torch.uint8).view(sizes) if values else torch.zeros(sizes, dtype=torch.uint8)


def sklearn_digits() -> tuple[Images, Images]:
    """Return the 1,797 8×8 digits of scikit-learn, scaled to 0 … 255; the last fifth is for validation."""
    with optional_dependency("these digits come with scikit-learn: pip install 'clearhead[data]'"):
        from sklearn.datasets import load_digits
    data = load_digits()
    pixels = (torch.from_numpy(data.images) * (255 / 16)).round().to(torch.uint8)
    labels = torch.from_numpy(data.target)
    cut = len(labels) - len(labels) // 5
    return _both([pixels[:cut], labels[:cut], pixels[cut:], labels[cut:]], "digits, train", "digits, val")


def load_images(path: Path | str | None) -> tuple[Images, Images]:
    """Load training and validation images.

    Args:
        path: A supported file or folder; None for scikit-learn's digits.

    Returns:
        Training and validation images.

    Raises:
        DataError: The files contain no digits, or are damaged.
        StorageError: The path does not exist.
    """
    if path is None:
        return sklearn_digits()
    path = Path(path)
    if path.is_dir() or path.name.endswith(".mat"):
        return _from_folder(path if path.is_dir() else path.parent)
    if ".npz" in path.suffixes:
        return read_npz(path)
    if not path.exists():
        then = "give the pictures, or no path for scikit-learn's digits"
        raise StorageError(f"file or folder {path} does not exist; {then}")
    raise DataError(f"{path}: expected an npz (or npz.xz), or a folder with {' and '.join(_MAT_NAMES)} or idx files")


def _from_folder(folder: Path) -> tuple[Images, Images]:
    if (folder / _MAT_NAMES[0]).is_file():
        train, validation = (read_mat(folder / name) for name in _MAT_NAMES)
        return train, validation
    idx = [next((p for p in (folder / n, folder / f"{n}.gz") if p.is_file()), None) for n in _IDX_NAMES]
    if all(idx):
        return _both([read_idx(p) for p in idx if p is not None], f"{folder.name}, train", f"{folder.name}, t10k")
    npz_paths = sorted(p for ending in ("npz", "npz.xz", "npz.gz") for p in folder.glob(f"*.{ending}"))
    if len(npz_paths) == 1:
        return read_npz(npz_paths[0])
    raise StorageError(
        f"{folder} has {len(npz_paths)} npz files and neither {' and '.join(_MAT_NAMES)} nor the four idx files: "
        "expected one of these kinds"
    )


# ---------------------------------------------------------------------- the task

_AUGMENT = 401


def prepare(pixels: Tensor, normalize: Normalization) -> Float[Tensor, "B 1 height width"]:
    """Convert images to normalized model inputs.

    Args:
        pixels: Values from 0 to 255, (B, height, width), uint8.
        normalize: Normalization of pixel values.
    """
    return normalize(pixels[:, None].to(torch.float32) / 255)


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
