"""Reading lines from files that may be compressed, and what became of the rows in them.

A line is read as bytes and handed on with its number; who reads it decides what a good line is. Compression is seen
from the first bytes, not from the name: xz, gzip, zip, and tar inside any of them, whose largest .txt or .tsv is read.
Reading never stops at a bad row and never hides one: each is kept under its reason by the number of its line, so that a
person can look."""

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
# What the libraries raise for content that is not what its first bytes promised.
_DAMAGE = (lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError)


def require_file(path: Path) -> Path:
    """The path of a file; what is none is refused, and what to do said."""
    if path.is_dir():
        raise StorageError(f"{path} is a folder, expected a file: name the file inside it")
    if not path.is_file():
        raise StorageError(f"there is no file {path}: check the path, or fetch the data set first")
    return path


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, decompressed. A torn or damaged one is a `StorageError` wherever the damage shows."""
    require_file(path)
    with contextlib.ExitStack() as stack:
        try:
            with path.open("rb") as raw:
                magic = raw.read(6)
            if magic.startswith(b"PK\x03\x04"):
                archive = stack.enter_context(zipfile.ZipFile(path))
                sizes = {item.filename: item.file_size for item in archive.infolist()}
                yield stack.enter_context(archive.open(_largest_text(path, sizes)))
            # Looking inside a compressed file means decompressing its start, so only names that say tar are asked.
            elif re.search(r"\.tar|\.t[gx]z$", path.name.lower()):
                tar = stack.enter_context(tarfile.open(path))
                members = {item.name: item for item in tar.getmembers() if item.isfile()}
                # Its checksum stands after the last member, and is looked at by whoever reads so far.
                while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                    pass
                name = _largest_text(path, {name: item.size for name, item in members.items()})
                # None only for what is no plain file, which `members` leaves out.
                yield stack.enter_context(cast(IO[bytes], tar.extractfile(members[name])))
            elif magic == b"\xfd7zXZ\x00":
                yield stack.enter_context(lzma.open(path))
            elif magic.startswith(b"\x1f\x8b"):
                yield cast(IO[bytes], stack.enter_context(gzip.GzipFile(path)))
            else:
                yield stack.enter_context(path.open("rb"))
        except _DAMAGE as error:
            raise StorageError(f"{path} is damaged or cut short ({error}): fetch it again") from error


def _largest_text(path: Path, sizes: dict[str, int]) -> str:
    texts = {name: size for name, size in sizes.items() if name.lower().endswith((".txt", ".tsv"))}
    if not texts:
        raise DataError(f"{path} holds no .txt or .tsv file, but {len(sizes)} others: unpack it and name the right one")
    return max(texts, key=lambda name: (texts[name], name))


def read_lines(path: Path, *, max_bytes: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """(number from 1, line without its ending) for each line.

    A line over `max_bytes` comes as None and is never held whole. Lines end in LF or CR LF. A byte order mark at the
    very start is dropped."""
    limit = -1 if max_bytes is None else max_bytes + len(b"\r\n")
    with open_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(limit), b""), 1):
            if number == 1:
                line = line.removeprefix(BOM)
            if limit > 0 and not line.endswith(b"\n") and len(line) >= limit:
                while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
                continue
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            yield number, line if max_bytes is None or len(line) <= max_bytes else None


def sha256(path: Path) -> str:
    """The SHA-256 of a file as it lies there, in hexadecimal."""
    with require_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def decode_lines(content: bytes) -> tuple[str, int, list[int]]:
    """The text of bytes without its lines that are not UTF-8, how many lines there are, and the numbers of those."""
    n_lines = content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
    try:
        return content.decode(), n_lines, []
    except UnicodeDecodeError:
        kept, bad = [], []
        for number, line in enumerate(io.BytesIO(content), 1):
            try:
                kept.append(line.decode())
            except UnicodeDecodeError:
                bad.append(number)
        return "".join(kept), n_lines, bad


# ---------------------------------------------------------------------- reports

NO_TAB, EMPTY_SIDE, NOT_UTF8, TOO_LONG = "no tab", "empty side", "not UTF-8", "too long"
_LINES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class RowReport:
    """The good and the skipped rows of one source; `str()` is a paragraph for people."""

    source: str
    n_rows: int
    skipped: Mapping[str, Sequence[int]] = field(default_factory=dict)  # by reason: the lines (from 1), in order

    @property
    def n_skipped(self) -> int:
        """How many rows were left out, for all reasons together."""
        return sum(map(len, self.skipped.values()))

    @property
    def n_good(self) -> int:
        """How many rows were kept."""
        return self.n_rows - self.n_skipped

    def __str__(self) -> str:
        reasons = []
        for reason, lines in self.skipped.items():
            first = ", ".join(map(str, lines[:_LINES_SHOWN])) + (", …" if len(lines) > _LINES_SHOWN else "")
            reasons.append(f"{reason} {len(lines):,} ({'line' if len(lines) == 1 else 'lines'} {first})")
        good = f"{self.source}: {self.n_good:,} of {self.n_rows:,} rows are good"
        return f"{good}; skipped: {'; '.join(reasons)}." if reasons else f"{good}."

    def with_skipped(self, reason: str, lines: Sequence[int]) -> RowReport:
        """The same report with further rows, counted as good before, skipped for a reason found later."""
        if not lines:
            return self
        return replace(self, skipped={**self.skipped, reason: sorted((*self.skipped.get(reason, ()), *lines))})

    def require_good(self) -> None:
        """Raise where no row at all can be used."""
        if self.n_good == 0:
            expected = "expected at least one usable row: check that this is the right file and format"
            raise DataError(f"{str(self).removesuffix('.')}; {expected}")
