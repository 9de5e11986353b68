"""Read lines from possibly compressed files, and report skipped rows.

Lines are yielded as bytes with their numbers; the caller decides whether a line is valid. The format is recognized by
the first bytes, not by the name: xz, gzip, zip, and tar inside any of them (the largest .txt or .tsv member is read).
Invalid rows do not stop the reading; their line numbers are reported for each reason."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, cast

from clearhead.errors import DataError, StorageError

BOM = b"\xef\xbb\xbf"
# Exceptions of the libraries for corrupted content.
_CORRUPTION_ERRORS = (lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError)


def require_file(path: Path) -> Path:
    """Return the path, or raise StorageError with a hint if it is not a file."""
    if path.is_dir():
        raise StorageError(f"{path} is a folder, expected a file; give the path of a file inside it")
    if not path.is_file():
        raise StorageError(f"file {path} does not exist: check the path, or download the data set first")
    return path


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading its decompressed content; corrupted content raises StorageError."""
    require_file(path)
    with contextlib.ExitStack() as stack:
        try:
            with path.open("rb") as raw:
                magic = raw.read(6)
            if magic.startswith(b"PK\x03\x04"):
                archive = stack.enter_context(zipfile.ZipFile(path))
                sizes = {item.filename: item.file_size for item in archive.infolist()}
                yield cast(IO[bytes], stack.enter_context(_open_member(archive, _largest_text(path, sizes))))
            # Detecting tar inside a compressed file would require decompressing it, so the name decides.
            elif re.search(r"\.tar|\.t[gx]z$", path.name.lower()):
                tar = stack.enter_context(tarfile.open(path))
                members = {item.name: item for item in tar.getmembers() if item.isfile()}
                # The checksum follows the last member; reading to the end verifies it.
                while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                    pass
                name = _largest_text(path, {name: item.size for name, item in members.items()})
                # None only for members that are not regular files, which `members` excludes.
                yield stack.enter_context(cast(IO[bytes], tar.extractfile(members[name])))
            elif magic == b"\xfd7zXZ\x00":
                yield stack.enter_context(lzma.open(path))
            elif magic.startswith(b"\x1f\x8b"):
                yield cast(IO[bytes], stack.enter_context(gzip.GzipFile(path)))
            else:
                yield stack.enter_context(path.open("rb"))
        except _CORRUPTION_ERRORS as error:
            raise StorageError(f"{path} is corrupted or incomplete ({error}); download it again") from error


def _open_member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipExtFile:
    """Open a file of an archive; raise `StorageError` if it is encrypted or its compression is not supported."""
    try:
        return cast(zipfile.ZipExtFile, archive.open(name))
    except RuntimeError as error:
        then = "unpack it and give the path of the file"
        raise StorageError(f"{archive.filename} cannot be unpacked ({error}); {then}") from error


def _largest_text(path: Path, sizes: dict[str, int]) -> str:
    """Return the name of the largest text file in an archive."""
    texts = {name: size for name, size in sizes.items() if name.lower().endswith((".txt", ".tsv"))}
    if not texts:
        raise DataError(
            f"{path} contains no .txt or .tsv file among {len(sizes)} files; unpack it and give the path of one"
        )
    return max(texts, key=lambda name: (texts[name], name))


def read_lines(path: Path, *, max_bytes: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number (from 1) and the content of each line, without the line end (LF or CR LF).

    A line longer than `max_bytes` is yielded as None and never fully in memory. A byte order mark at the start
    is dropped."""
    limit = -1 if max_bytes is None else max_bytes + len(b"\r\n")
    with open_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(limit), b""), 1):
            if number == 1:
                line = line.removeprefix(BOM)
            if limit > 0 and not line.endswith(b"\n") and len(line) >= limit:
                while (chunk := file.readline(1 << 20)) and not chunk.endswith(b"\n"):
                    pass
                yield number, None
                continue
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            yield number, line if max_bytes is None or len(line) <= max_bytes else None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as stored, in hexadecimal."""
    with require_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def decode_lines(content: bytes) -> tuple[str, int, list[int]]:
    """Return the text without lines that are not UTF-8, the number of lines, and the numbers of the dropped lines."""
    n_lines = content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
    try:
        return content.decode(), n_lines, []
    except UnicodeDecodeError:
        valid = []
        invalid = []
        for number, line in enumerate(io.BytesIO(content), 1):
            try:
                valid.append(line.decode())
            except UnicodeDecodeError:
                invalid.append(number)
        return "".join(valid), n_lines, invalid


# ---------------------------------------------------------------------- reports

NO_TAB = "no tab"
EMPTY_SIDE = "empty side"
NOT_UTF8 = "not UTF-8"
TOO_LONG = "too long"
_MAX_LINES_IN_MESSAGE = 5


@dataclass(frozen=True, kw_only=True)
class RowReport:
    """Number of rows of a source, and the skipped ones. `str()` is a sentence for display.

    Args:
        source: Name of the source.
        n_rows: Number of rows.
        skipped: Line numbers (from 1) by reason.
    """

    source: str
    n_rows: int
    skipped: Mapping[str, Sequence[int]] = field(default_factory=dict)  # line numbers (from 1) by reason

    @property
    def n_skipped(self) -> int:
        """Number of skipped rows."""
        return sum(map(len, self.skipped.values()))

    @property
    def n_good(self) -> int:
        """Number of valid rows."""
        return self.n_rows - self.n_skipped

    def __str__(self) -> str:
        reasons = []
        for reason, lines in self.skipped.items():
            first = ", ".join(map(str, lines[:_MAX_LINES_IN_MESSAGE])) + (
                ", …" if len(lines) > _MAX_LINES_IN_MESSAGE else ""
            )
            reasons.append(f"{reason} {len(lines):,} ({'line' if len(lines) == 1 else 'lines'} {first})")
        good = f"{self.source}: {self.n_good:,} of {self.n_rows:,} rows are good"
        return f"{good}; skipped: {'; '.join(reasons)}." if reasons else f"{good}."

    def with_skipped(self, reason: str, lines: Sequence[int]) -> RowReport:
        """Return the report with additional skipped rows."""
        if not lines:
            return self
        return replace(self, skipped={**self.skipped, reason: sorted((*self.skipped.get(reason, ()), *lines))})

    def require_good(self) -> None:
        """Raise DataError if no row is valid."""
        if self.n_good == 0:
            expected = "expected at least one valid row; check the file and its format"
            raise DataError(f"{str(self).removesuffix('.')}; {expected}")
