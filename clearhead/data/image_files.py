"""Read images of ten classes.

Supported files are SVHN's cropped digits (`train_32x32.mat`, `test_32x32.mat`), an npz with `x_train y_train x_val
y_val` (also inside xz), the idx files of MNIST and Fashion-MNIST, and the 8×8 digits of scikit-learn."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead._core.shapes import Int
from clearhead.data import files
from clearhead.errors import DataError, StorageError, optional_dependency

if TYPE_CHECKING:
    import numpy as np

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
