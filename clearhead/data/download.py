"""Known data sets, and resumable downloads of their files.

No data set is part of the package. `fetch(name, folder)` downloads one; a copy from elsewhere can be used too, and
`identify(path)` recognizes known files. A file without a known checksum is checked by its structure only, which the
listing reports.

Partial content is stored in `NAME.part`, and an interrupted download continues there with a range request. Only a file
with the expected size and checksum gets its final name."""

from __future__ import annotations

import http.client
import json
import os
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clearhead._core.atomic_io import write_atomically
from clearhead._core.validation import lookup, require
from clearhead.data import files
from clearhead.errors import DataError, StorageError

DownloadProgress = Callable[[int, int | None], None]
"""Called with the number of bytes so far and the total, if known."""

_CHUNK = 1 << 16
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, kw_only=True)
class Download:
    """A remote file.

    Args:
        url: Address.
        name: Local name.
        size: Expected bytes, if known.
        sha256: Expected checksum, if known.
    """

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        is_web = self.url.startswith(("http://", "https://"))
        is_plain = Path(self.name).name == self.name
        require(is_web, f"address is {self.url!r}; expected http:// or https://")
        require(is_plain, f"file name is {self.name!r}; expected a name without folders")


def fetch_file(
    remote: Download,
    folder: Path | str,
    *,
    tries: int = 5,
    timeout: float = 30.0,
    pause: float = 1.0,
    progress: DownloadProgress | None = None,
) -> Path:
    """Download a file into a folder, unless a valid copy is there.

    Args:
        remote: The file.
        folder: Target folder; created if necessary.
        tries: Successive failures without new data before giving up.
        timeout: Timeout of the connection in seconds.
        pause: Seconds before the second try; doubled after each failure.
        progress: Called after each chunk.

    Returns:
        The path of the file.

    Raises:
        StorageError: The download failed, or the file has another size or checksum.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / remote.name
    if target.is_file() and _mismatch(remote, target) is None:
        return target
    part = folder / f"{remote.name}.part"
    failures = 0
    while True:
        before = _size(part)
        try:
            _resume_download(remote, part, timeout=timeout, progress=progress)
            break
        except (http.client.HTTPException, OSError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise StorageError(
                    f"{remote.url} returned {error.code} {error.reason}; the file may have moved: "
                    f"download it to {target}"
                ) from error
            failures = 1 if _size(part) > before else failures + 1
            if failures >= tries:
                raise StorageError(
                    f"{remote.url} could not be downloaded ({error}) after {tries} tries; "
                    f"{_size(part):,} bytes are in {part}: "
                    "try again to resume"
                ) from error
            time.sleep(min(pause * 2 ** (failures - 1), 30.0))
    if (mismatch := _mismatch(remote, part)) is not None:
        _discard(part)
        raise StorageError(f"{remote.url} returned {mismatch}")
    os.replace(part, target)
    _metadata_path(part).unlink(missing_ok=True)
    return target


def _size(path: Path) -> int:
    """Return the size of a file, or 0 if it does not exist."""
    return path.stat().st_size if path.is_file() else 0


def _mismatch(remote: Download, path: Path) -> str | None:
    """Return how a file differs from the expected one, or None."""
    if remote.size is not None and (size := path.stat().st_size) != remote.size:
        return f"{size:,} bytes, expected {remote.size:,}"
    if remote.sha256 is not None and (digest := files.sha256(path)) != remote.sha256:
        return f"a file with sha256 {digest}, expected {remote.sha256}; the content was discarded"
    return None


def _resume_download(remote: Download, part: Path, *, timeout: float, progress: DownloadProgress | None) -> None:
    """Request the missing bytes and append them; return when the file is complete."""
    n_bytes, version = _partial_content(remote, part)
    if remote.size is not None and n_bytes == remote.size:
        return
    headers = {"User-Agent": "clearhead", "Accept-Encoding": "identity"}
    if n_bytes:
        headers["Range"] = f"bytes={n_bytes}-"
        if version:
            headers["If-Range"] = version  # if the file has changed, the server sends all of it
    try:
        response = urllib.request.urlopen(urllib.request.Request(remote.url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_NOT_SATISFIABLE and n_bytes:
            _discard(part)
            raise ConnectionError("the server has no more bytes; restarting the download") from error
        raise
    with response:
        if response.status == 206:
            # For example 5-9/10.
            content_range, _, size = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
            start = _parse_int(content_range.partition("-")[0])
            total = _parse_int(size)
            if start != n_bytes:
                _discard(part)
                raise ConnectionError(
                    f"requested bytes from {n_bytes}, got bytes from {start}; restarting the download"
                )
        else:
            n_bytes = 0
            total = _parse_int(response.headers.get("Content-Length"))
        version = response.headers.get("ETag") or response.headers.get("Last-Modified")
        strong_version = version if version and not version.startswith("W/") else None  # ranges need a strong tag
        write_atomically(_metadata_path(part), json.dumps({"url": remote.url, "version": strong_version}).encode())
        with part.open("ab" if n_bytes else "wb") as out:
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                n_bytes += len(chunk)
                if remote.size is not None and n_bytes > remote.size:
                    return  # larger than expected; the size check reports it
                if progress is not None:
                    progress(n_bytes, total if total is not None else remote.size)
            out.flush()
            os.fsync(out.fileno())
    if total is not None and n_bytes < total:
        raise ConnectionError(f"the connection ended at byte {n_bytes:,} of {total:,}")


def _parse_int(text: str | None) -> int | None:
    """Parse a decimal number of a header."""
    return int(text) if text is not None and text.isdecimal() else None


def _metadata_path(part: Path) -> Path:
    """Return the path of the file with the address and version of partial content."""
    return part.with_name(f"{part.name}.json")


def _partial_content(remote: Download, part: Path) -> tuple[int, str | None]:
    """Return the number of bytes to resume after, and the version of the file that they belong to."""
    try:
        metadata = json.loads(_metadata_path(part).read_text(encoding="utf-8"))
        if metadata["url"] == remote.url and part.is_file():
            return part.stat().st_size, metadata["version"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    _discard(part)  # from another or an unknown address
    return 0, None


def _discard(part: Path) -> None:
    """Remove partial content."""
    part.unlink(missing_ok=True)
    _metadata_path(part).unlink(missing_ok=True)


# ---------------------------------------------------------------------- data sets


@dataclass(frozen=True, kw_only=True)
class DatasetFile:
    """A file that a user may have, recognized by its checksum.

    Args:
        name: Usual name of the file.
        size: Bytes.
        sha256: Checksum.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A data set as listed by `clearhead data`."""

    name: str
    task: str  # task that uses it
    description: str
    license: str
    origin: str  # source, and how to get it if it cannot be downloaded
    remotes: tuple[Download, ...] = ()
    copies: tuple[DatasetFile, ...] = ()

    @property
    def size(self) -> int | None:
        """Bytes to download (or of the known copies if there are no downloads); None if unknown."""
        sizes = [item.size for item in self.remotes or self.copies]
        return sum(size or 0 for size in sizes) if sizes and None not in sizes else None

    @property
    def verified(self) -> str:
        """How downloads are verified, for display."""
        if not self.remotes:
            return "nothing to download"
        if all(remote.sha256 for remote in self.remotes):
            return "sha256"
        return "structure only (unknown checksum)"


def _read_datasets() -> Iterator[DatasetInfo]:
    """Read datasets.toml. The default name of a download is the last part of its address."""
    table = tomllib.loads((Path(__file__).parent / "datasets.toml").read_text(encoding="utf-8"))
    for name, row in table.items():
        remotes = tuple(Download(**{"name": Path(file["url"]).name} | file) for file in row.pop("remotes", ()))
        copies = tuple(DatasetFile(**file) for file in row.pop("copies", ()))
        yield DatasetInfo(name=name, **row, remotes=remotes, copies=copies)


DATASETS: tuple[DatasetInfo, ...] = tuple(_read_datasets())


def get_dataset(name: str, datasets: Iterable[DatasetInfo] = DATASETS) -> DatasetInfo:
    """Return a data set by name.

    Args:
        name: Name of the data set.
        datasets: The known data sets.

    Raises:
        ConfigError: The data set is unknown.
    """
    return lookup(name, {item.name: item for item in datasets}, "no data set is called")


def fetch(
    name: str | DatasetInfo,
    folder: Path | str,
    *,
    progress: DownloadProgress | None = None,
    tries: int = 5,
    pause: float = 1.0,
) -> list[Path]:
    """Download the files of a data set into a folder, resuming interrupted downloads.

    Args:
        name: The data set, or its name.
        folder: Target folder.
        progress: Is called with the progress of each file.
        tries: Successive failures without new data before giving up.
        pause: Seconds before the second try; doubled after each failure.

    Returns:
        The paths of the files.

    Raises:
        DataError: The data set has no downloads.
        StorageError: A download failed or is invalid.
    """
    item = get_dataset(name) if isinstance(name, str) else name
    if not item.remotes:
        raise DataError(f"{item.name} cannot be downloaded; get it from: {item.origin}")
    paths = []
    for remote in item.remotes:
        path = fetch_file(remote, folder, progress=progress, tries=tries, pause=pause)
        if remote.sha256 is None:
            _check_structure(item, path)
        paths.append(path)
    return paths


def _check_structure(item: DatasetInfo, path: Path) -> None:
    """Read a file without a known checksum as its task does; an unreadable file is renamed to `.bad`."""
    try:
        if item.task == "translation":
            from clearhead.data.tasks.translation import read_pairs

            read_pairs(path)
        elif item.task == "text":
            from clearhead.data.tasks.text import read_text

            read_text(path)
        elif path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
    except (DataError, StorageError) as error:
        renamed = path.with_name(f"{path.name}.bad")
        path.replace(renamed)
        raise StorageError(f"the download of {item.name} is invalid ({error}) and was renamed to {renamed}") from error


def identify(path: Path | str, datasets: Iterable[DatasetInfo] = DATASETS) -> tuple[DatasetInfo, str] | None:
    """Return the data set and the usual name of a local file by its checksum, or None.

    Args:
        path: The file.
        datasets: The known data sets.
    """
    digest = files.sha256(Path(path))
    for item in datasets:
        known_files: tuple[DatasetFile | Download, ...] = (*item.copies, *item.remotes)
        for file in known_files:
            if file.sha256 == digest:
                return item, file.name
    return None
