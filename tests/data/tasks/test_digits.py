"""Images from all supported files, normalization and augmentation."""

from __future__ import annotations

import gzip
import lzma
import struct
import zipfile

import numpy
import pytest
import torch
from PIL import Image

from clearhead.data import (
    Batches,
    DatasetNormalize,
    DigitClassification,
    FixedSize,
    ImageNormalize,
    RandomAffine,
    RandomContrast,
    RandomShift,
    Task,
    load_images,
    normalization_from_dict,
    normalization_to_dict,
    prepare,
)
from clearhead.data.image_files import read_idx, read_mat, to_grayscale
from clearhead.errors import ConfigError, DataError, MissingDependencyError, StorageError


def _random(*shape, seed=0):
    return numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)


def _write_npz(path, n=31, m=7, **changes):
    arrays = {
        "x_train": _random(n, 11, 13),
        "y_train": (numpy.arange(n) % 10).astype(numpy.uint8),
        "x_val": _random(m, 11, 13, seed=1),
        "y_val": (numpy.arange(m) % 10).astype(numpy.uint8),
    }
    arrays |= changes
    numpy.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def test_to_grayscale_equals_pillow():
    color = _random(37, 41, 3)
    expected = numpy.asarray(Image.fromarray(color).convert("L"))
    assert numpy.array_equal(to_grayscale(torch.from_numpy(color)).numpy(), expected)


def test_read_mat_svhn_files(tmp_path):
    scipy_io = pytest.importorskip("scipy.io", reason="scipy writes the .mat files of this test")
    X = _random(32, 32, 3, 5)
    y = numpy.array([[1], [10], [3], [10], [9]], dtype=numpy.uint8)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        scipy_io.savemat(tmp_path / name, {"X": X, "y": y})
    for path in (tmp_path, tmp_path / "train_32x32.mat"):
        train, validation = load_images(path)
        assert train.labels.tolist() == validation.labels.tolist() == [1, 0, 3, 0, 9]
        fourth = numpy.asarray(Image.fromarray(X[..., 3]).convert("L"))
        assert numpy.array_equal(train.pixels[3].numpy(), fourth)
    (tmp_path / "train_32x32.mat").write_bytes(b"not a mat file")
    with pytest.raises(StorageError, match=r"cannot be read as a \.mat file"):
        read_mat(tmp_path / "train_32x32.mat")
    scipy_io.savemat(tmp_path / "other.mat", {"Z": X})
    with pytest.raises(DataError, match="lacks X or y: expected the cropped digits"):
        read_mat(tmp_path / "other.mat")
    with pytest.raises(StorageError, match=r"file .* does not exist"):
        read_mat(tmp_path / "none.mat")


def test_read_mat_without_scipy_raises_missing_dependency(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.io", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'clearhead\[data\]'"):
        read_mat(tmp_path / "train_32x32.mat")


@pytest.mark.parametrize("squeeze", [None, lzma.compress, gzip.compress])
def test_read_npz_plain_and_compressed(tmp_path, squeeze):
    arrays = _write_npz(tmp_path / "d.npz")
    path = tmp_path / "d.npz"
    if squeeze is not None:
        path = tmp_path / ("d.npz.xz" if squeeze is lzma.compress else "d.npz.gz")
        path.write_bytes(squeeze((tmp_path / "d.npz").read_bytes()))
        (tmp_path / "d.npz").unlink()
    for place in (path, tmp_path):
        train, validation = load_images(place)
        assert numpy.array_equal(train.pixels.numpy(), arrays["x_train"])
        assert validation.labels.tolist() == list(range(7))


def test_read_npz_corrupted_compression_raises_storage_error(tmp_path):
    _write_npz(tmp_path / "d.npz")
    arrays = dict(numpy.load(tmp_path / "d.npz"))
    numpy.savez_compressed(tmp_path / "d.npz", **arrays)
    content = bytearray((tmp_path / "d.npz").read_bytes())
    content[87] ^= 2
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(StorageError, match="cannot be read as npz"):
        load_images(tmp_path / "d.npz")


def test_read_npz_huge_shape_raises_storage_error(tmp_path):
    header = repr({"descr": "|u1", "fortran_order": False, "shape": (2**60,)}).encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(StorageError, match="cannot be read as npz"):
        load_images(tmp_path / "d.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_val": None}, "has x_train, y_train, x_val of the arrays"),
        ({"y_train": numpy.full(31, 10, numpy.uint8)}, "labels from 10 to 10, expected 0 to 9"),
        ({"y_train": numpy.zeros(30, numpy.uint8)}, "31 pictures but labels of shape"),
        ({"x_val": numpy.zeros((7, 11), numpy.uint8)}, r"shape \(7, 11\)"),
        ({"x_val": numpy.zeros((0, 1, 1), numpy.uint8), "y_val": numpy.zeros(0, numpy.uint8)}, "no pictures"),
        ({"x_val": numpy.array(["a"])}, "expected numbers"),
    ],
)
def test_read_npz_invalid_arrays_raise_data_error(tmp_path, changes, message):
    _write_npz(tmp_path / "d.npz", **changes)
    with pytest.raises(DataError, match=message):
        load_images(tmp_path / "d.npz")


def test_read_npz_pickled_array_raises_storage_error(tmp_path):
    _write_npz(tmp_path / "d.npz", x_val=numpy.array([{"a": 1}], dtype=object))
    with pytest.raises(StorageError, match="cannot be read as npz"):
        load_images(tmp_path / "d.npz")
    (tmp_path / "d.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(StorageError, match="cannot be read as npz"):
        load_images(tmp_path / "d.npz")


def _idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_idx_files_are_read_and_truncated_ones_raise(tmp_path):
    x, y = _random(5, 7, 3), numpy.arange(5, dtype=numpy.uint8)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx(x)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(_idx(y))
    train, validation = load_images(tmp_path)
    assert numpy.array_equal(train.pixels.numpy(), x)
    assert validation.labels.tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "a").write_bytes(_idx(x)[:-1])
    with pytest.raises(StorageError, match="has 104 values, its header says 105"):
        read_idx(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"\x01\x02\x03\x04")
    with pytest.raises(DataError, match="expected 00 00 08, got 01 02 03"):
        read_idx(tmp_path / "a")


def test_load_images_without_path_uses_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets", reason="these digits come with scikit-learn")
    task = DigitClassification.load()
    assert isinstance(task, Task)
    assert (len(task.train), len(task.validation), task.image_size) == (1438, 359, (8, 8))
    data = sklearn.load_digits()
    assert task.validation.labels.tolist() == data.target[1438:].tolist()
    assert numpy.abs(task.train.pixels.numpy() / 255 * 16 - data.images[:1438]).max() < 0.5 * 16 / 255 + 1e-9


def test_load_images_unsupported_path_raises(tmp_path):
    with pytest.raises(StorageError, match="has 0 npz files and neither train_32x32"):
        load_images(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="expected an npz"):
        load_images(tmp_path / "a.png")
    with pytest.raises(StorageError, match=r"file .* does not exist"):
        load_images(tmp_path / "a.npz")
    with pytest.raises(StorageError, match=r"file or folder .* does not exist"):
        load_images(tmp_path / "nowhere")


@pytest.fixture
def task(tmp_path):
    _write_npz(tmp_path / "d.npz", n=101)
    return DigitClassification.load(tmp_path, augment=(RandomShift(2), RandomContrast()), seed=3)


def test_load_normalizes_with_training_statistics(task):
    x = task.train.pixels.double() / 255
    assert task.normalize.mean == pytest.approx(float(x.mean()), rel=1e-12)
    assert task.normalize.std == pytest.approx(float(x.std(correction=0)), rel=1e-12)
    batch = task.validation.batch(torch.tensor([4, 2]))
    expected = (task.validation.pixels[[4, 2]].double() / 255 - x.mean()) / x.std(correction=0)
    assert batch.images.shape == (2, 1, 11, 13)
    assert batch.images.dtype == torch.float32
    torch.testing.assert_close(batch.images[:, 0].double(), expected, rtol=1e-5, atol=1e-5)
    assert batch.labels.tolist() == [4, 2]
    assert batch.n_labels == int(batch.weights.sum()) == 2
    torch.testing.assert_close(prepare(task.validation.pixels[[4, 2]], task.normalize), batch.images)


def test_image_normalize_normalizes_each_image():
    x = torch.rand(5, 1, 11, 13) * torch.arange(1, 6).view(5, 1, 1, 1)
    y = ImageNormalize()(x)
    assert y.mean(dim=(-2, -1)).abs().max() < 1e-5
    torch.testing.assert_close(y.std(dim=(-2, -1), correction=0), torch.ones(5, 1))
    assert torch.equal(ImageNormalize()(torch.full((1, 1, 3, 5), 0.5)), torch.zeros(1, 1, 3, 5))
    even = DatasetNormalize.of(torch.full((2, 3, 5), 9, dtype=torch.uint8))
    assert torch.isfinite(even(torch.rand(3, 5))).all()


@pytest.mark.parametrize("choice", [DatasetNormalize(0.25, 0.5), ImageNormalize(0.125)])
def test_normalization_dict_round_trip(choice):
    assert normalization_from_dict(normalization_to_dict(choice)) == choice


def test_normalization_invalid_values_raise_config_error():
    with pytest.raises(
        ConfigError, match="normalization: unknown variant 'Other'; known: DatasetNormalize, ImageNormalize"
    ):
        normalization_from_dict({"type": "Other"})
    with pytest.raises(ConfigError, match="normalization: ImageNormalize has no field 'a'; known: floor"):
        normalization_from_dict({"type": "ImageNormalize", "a": 1})
    with pytest.raises(ConfigError, match=r"DatasetNormalize: std is 0\.0; expected a number above 0"):
        DatasetNormalize(0.0, 0.0)


def test_augmentation_depends_on_epoch_and_image_but_not_on_the_batch(task):
    alone = task.train.batch(torch.tensor([7]), epoch=4).images[0]
    among = task.train.batch(torch.tensor([3, 7, 50]), epoch=4).images[1]
    assert torch.equal(alone, among)
    assert not torch.equal(alone, task.train.batch(torch.tensor([7]), epoch=5).images[0])
    # Two processes together see what one sees, changes included.
    together = next(iter(Batches(task.train, FixedSize(11), seed=1)))
    parts = [next(iter(Batches(task.train, FixedSize(11), seed=1, rank=rank, world=2))) for rank in range(2)]
    assert torch.equal(together.images[0::2], parts[0].images)
    assert torch.equal(together.images[1::2], parts[1].images)


def test_random_shift_moves_by_pixels_and_repeats_the_border():
    x = torch.arange(2 * 5 * 7.0).view(2, 1, 5, 7)
    # Draws of 0, 0.5 and 0.99 are the shifts −2, 0 and 2 of the five shifts −2 … 2.
    y = RandomShift(2)(x, torch.tensor([[0.5, 0.5], [0.0, 0.99]]))
    assert torch.equal(y[0], x[0])
    for row in range(5):
        for column in range(7):
            assert y[1, 0, row, column] == x[1, 0, min(row + 2, 4), max(column - 2, 0)]


def test_random_affine_neutral_draws_are_identity_and_scale_about_the_center():
    x = torch.rand(3, 1, 9, 9)
    still = RandomAffine(shift=0.3, scale=0.3, degrees=40.0)
    torch.testing.assert_close(still(x, torch.full((3, 4), 0.5)), x, rtol=1e-4, atol=1e-5)
    # Half the size: the distance from the middle is doubled where it comes from.
    ramp = torch.arange(9.0).expand(1, 1, 9, 9) - 4
    half = RandomAffine(shift=0.0, scale=0.5)(ramp, torch.tensor([[0.5, 0.5, 0.0, 0.5]]))
    torch.testing.assert_close(half[0, 0, 4], (ramp[0, 0, 4] * 2).clamp(-4, 4), rtol=1e-4, atol=1e-4)
    # A quarter turn is torch's own rot90, one way or the other.
    rotated = RandomAffine(shift=0.0, scale=0.0, degrees=90.0)(x, torch.tensor([[0.5, 0.5, 0.5, 1.0]] * 3))
    torch.testing.assert_close(rotated, torch.rot90(x, 1, (-2, -1)), rtol=1e-3, atol=1e-4)


def test_random_contrast_preserves_the_mean():
    x = torch.rand(3, 1, 5, 7)
    y = RandomContrast(amount=0.5, invert=0.5)(x, torch.tensor([[0.0, 0.9], [0.75, 0.9], [0.5, 0.1]]))
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    factors = torch.tensor([0.5, 1.25, -1.0]).view(3, 1, 1, 1)
    torch.testing.assert_close(y, mean + factors * (x - mean))


@pytest.mark.parametrize(
    "make", [lambda: RandomShift(-1), lambda: RandomAffine(scale=1.0), lambda: RandomContrast(invert=2.0)]
)
def test_augmentation_invalid_arguments_raise_config_error(make):
    with pytest.raises(ConfigError, match=r"expected|must not"):
        make()


def test_image_split_to_device_makes_batches_there(task):
    batch = task.train.to("meta").batch(torch.tensor([1, 2]))
    assert {batch.images.device.type, batch.labels.device.type, batch.weights.device.type} == {"meta"}
    assert task.train.batch(torch.tensor([1])).device.type == "cpu"
