"""Lines from plain and compressed files, and the report of skipped rows."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
import zipfile

import pytest

from clearhead._core import atomic_io
from clearhead.data import files
from clearhead.data.files import NO_TAB, TOO_LONG, RowReport
from clearhead.errors import DataError, StorageError
from tests.support.faults import failing

CONTENT = b"\xef\xbb\xbfone\r\ntwo\n\nlast"
LINES = [(1, b"one"), (2, b"two"), (3, b""), (4, b"last")]


def _write(folder, kind):
    path = folder / {"plain": "a.txt", "xz": "a.xz", "gz": "a.gz", "zip": "a.zip", "tar": "a.tar.gz"}[kind]
    if kind == "plain":
        path.write_bytes(CONTENT)
    elif kind == "xz":
        path.write_bytes(lzma.compress(CONTENT))
    elif kind == "gz":
        path.write_bytes(gzip.compress(CONTENT))
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("_about.txt", b"short")
            archive.writestr("pairs.txt", CONTENT)
            archive.writestr("large.bin", b"0" * 999)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, data in [("x/data/pairs.tsv", CONTENT), ("x/setup.py", b"0" * 999), ("x/b.txt", b"b")]:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("kind", ["plain", "xz", "gz", "zip", "tar"])
def test_read_lines_does_not_depend_on_compression(tmp_path, kind):
    assert list(files.read_lines(_write(tmp_path, kind))) == LINES


def test_read_lines_line_over_the_limit_is_none(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"12345\n123456\n" + b"x" * (3 << 20) + b"\n12345\r\n1234567")
    numbered = list(files.read_lines(path, max_bytes=5))
    assert numbered == [(1, b"12345"), (2, None), (3, None), (4, b"12345"), (5, None)]


def test_read_lines_invalid_file_raises(tmp_path):
    payload = lzma.compress(b"line\n" * 9973)
    (tmp_path / "truncated.xz").write_bytes(payload[: len(payload) // 2])
    with pytest.raises(StorageError, match=r"truncated\.xz is corrupted or incomplete .* download it again"):
        list(files.read_lines(tmp_path / "truncated.xz"))
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04rest")
    with pytest.raises(StorageError, match=r"bad\.zip is corrupted"):
        list(files.read_lines(tmp_path / "bad.zip"))
    with pytest.raises(StorageError, match=r"file .* does not exist"):
        list(files.read_lines(tmp_path / "none"))
    with pytest.raises(StorageError, match="is a folder, expected a file"):
        list(files.read_lines(tmp_path))
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("picture.png", b"0")
    with pytest.raises(DataError, match=r"contains no \.txt or \.tsv file among 1 files"):
        list(files.read_lines(tmp_path / "other.zip"))


@pytest.mark.parametrize("length", [1, 53, 4999])  # a checksum that is wrong, a stream that cannot be read on
@pytest.mark.parametrize("kind", ["xz", "gz", "zip", "tar"])
def test_read_lines_corrupted_in_the_middle_raises_storage_error(tmp_path, kind, length):
    content = b"".join(b"%d\n" % (n * n) for n in range(9973))
    path = tmp_path / {"xz": "a.xz", "gz": "a.gz", "zip": "a.zip", "tar": "a.tar.gz"}[kind]
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", content)
    elif kind == "tar":
        with tarfile.open(path, "w:gz") as archive:
            member = tarfile.TarInfo("a.txt")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    else:
        path.write_bytes((lzma if kind == "xz" else gzip).compress(content))
    payload = path.read_bytes()
    start = len(payload) // 2
    path.write_bytes(payload[:start] + b"\xff" * length + payload[start + length :])
    with pytest.raises(StorageError, match=r"is corrupted or incomplete .* download it again"):
        list(files.read_lines(path))


@pytest.mark.parametrize("kind", ["gz", "zip"])
def test_read_lines_invalid_compression_raises_storage_error(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "gz":
        path.write_bytes(gzip.compress(b"line\n" * 97))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", b"line\n" * 97)
    content = bytearray(path.read_bytes())
    content[{"gz": 10, "zip": 35}[kind]] = 0x07  # the first block says that it is of a kind that there is not
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"is corrupted or incomplete .* download it again"):
        list(files.read_lines(path))


def test_write_atomically_interrupted_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    atomic_io.write_atomically(path, b"old")
    with failing(os, "replace"), pytest.raises(OSError, match="No space left on device"):
        atomic_io.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_row_report_str_contains_line_numbers():
    report = RowReport(source="pairs.tsv", n_rows=19).with_skipped(NO_TAB, range(2, 20, 2)).with_skipped(TOO_LONG, [7])
    assert (report.n_rows, report.n_good, report.n_skipped) == (19, 9, 10)
    assert str(report) == (
        "pairs.tsv: 9 of 19 rows are good; skipped: no tab 9 (lines 2, 4, 6, 8, 10, …); too long 1 (line 7)."
    )
    assert str(RowReport(source="empty", n_rows=0)) == "empty: 0 of 0 rows are good."


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(8, 1, r"cannot be unpacked \(File .*encrypted"), (10, 99, r"cannot be unpacked \(That compression method")],
    ids=["encrypted", "unknown compression"],
)
def test_zip_that_cannot_be_unpacked_raises_storage_error(tmp_path, offset, value, message):
    path = tmp_path / "text.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("text.txt", "some text")
    content = bytearray(path.read_bytes())
    # The flags and the compression method, in the header of the file and in the directory of the archive.
    for start in (content.index(b"PK\3\4") - 2, content.index(b"PK\1\2")):
        content[start + offset] = value
    path.write_bytes(content)
    with pytest.raises(StorageError, match=message):
        list(files.read_lines(path))
