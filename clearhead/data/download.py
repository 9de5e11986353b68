"""The data sets this project knows, and how their files are fetched so that they are whole or not there.

None is part of the package. `fetch(name, folder)` brings one where a network allows; a copy got in any other way serves
as well, and `identify(path)` says whether a file is one of those known. A checksum that is not known is None: such a
file is then checked by its structure alone, and the listing says so.

What has arrived of a file stays in `NAME.part`, and a fetch that broke off goes on there: the server is asked for the
rest of it. Only a file of the right size and checksum gets its real name."""

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

Progress = Callable[[int, int | None], None]
"""Called with the bytes there and, where known, the bytes in all."""

_CHUNK = 1 << 16
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file somewhere: its address, its name here, and what it must be. An unknown checksum is None."""

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        is_web, is_plain = self.url.startswith(("http://", "https://")), Path(self.name).name == self.name
        require(is_web, f"address {self.url!r}: expected http:// or https://")
        require(is_plain, f"file name {self.name!r}: expected a plain name without folders")


def fetch_file(
    remote: Download,
    folder: Path | str,
    *,
    tries: int = 5,
    timeout: float = 30.0,
    pause: float = 1.0,
    progress: Progress | None = None,
) -> Path:
    """Bring a file into a folder, and give its path. One that is there and right is left as it is.

    A connection that breaks off is taken up again, with growing pauses, until `tries` in a row bring nothing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / remote.name
    if target.is_file() and _why_wrong(remote, target) is None:
        return target
    part = folder / f"{remote.name}.part"
    failures = 0
    while True:
        before = _size(part)
        try:
            _continue(remote, part, timeout=timeout, progress=progress)
            break
        except (http.client.HTTPException, OSError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise StorageError(
                    f"{remote.url} answered {error.code} {error.reason}: the file may have moved; "
                    f"get it by hand and put it at {target}"
                ) from error
            failures = 1 if _size(part) > before else failures + 1
            if failures >= tries:
                raise StorageError(
                    f"{remote.url} could not be fetched ({error}) after {tries} tries; "
                    f"{_size(part):,} bytes are kept in {part}: call again to go on from there"
                ) from error
            time.sleep(min(pause * 2 ** (failures - 1), 30.0))
    if (why := _why_wrong(remote, part)) is not None:
        _forget(part)
        raise StorageError(f"{remote.url} gave {why}")
    os.replace(part, target)
    _note(part).unlink(missing_ok=True)
    return target


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _why_wrong(remote: Download, path: Path) -> str | None:
    """What a file is instead of the one that is known; None where it is that."""
    if remote.size is not None and (size := path.stat().st_size) != remote.size:
        return f"{size:,} bytes, expected {remote.size:,}: it is not the file that is known"
    if remote.sha256 is not None and (got := files.sha256(path)) != remote.sha256:
        return f"a file with sha256 {got}, expected {remote.sha256}: it is thrown away"
    return None


def _continue(remote: Download, part: Path, *, timeout: float, progress: Progress | None) -> None:
    """Ask for what is missing and add it; return when the file is all there."""
    have, version = _what_is_there(remote, part)
    if remote.size is not None and have == remote.size:
        return
    headers = {"User-Agent": "clearhead", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if version:
            headers["If-Range"] = version  # a file that has changed since is sent anew and whole
    try:
        answer = urllib.request.urlopen(urllib.request.Request(remote.url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_NOT_SATISFIABLE and have:
            _forget(part)
            raise ConnectionError("the server has no more than what is there; starting anew") from error
        raise
    with answer:
        if answer.status == 206:
            place, _, size = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")  # 5-9/10
            start, total = _number(place.partition("-")[0]), _number(size)
            if start != have:
                _forget(part)
                raise ConnectionError(f"asked for the bytes from {have}, got those from {start}; starting anew")
        else:
            have, total = 0, _number(answer.headers.get("Content-Length"))
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        strong = version if version and not version.startswith("W/") else None  # a weak tag may not be used with ranges
        write_atomically(_note(part), json.dumps({"url": remote.url, "version": strong}).encode())
        with part.open("ab" if have else "wb") as out:
            while chunk := answer.read(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                if remote.size is not None and have > remote.size:
                    return  # not the file that was promised: no need of the rest, the size says so
                if progress is not None:
                    progress(have, total if total is not None else remote.size)
            out.flush()
            os.fsync(out.fileno())
    if total is not None and have < total:
        raise ConnectionError(f"the connection ended at byte {have:,} of {total:,}")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _what_is_there(remote: Download, part: Path) -> tuple[int, str | None]:
    """The bytes that can be gone on from, and the version of the file they are of."""
    try:
        note = json.loads(_note(part).read_text(encoding="utf-8"))
        if note["url"] == remote.url and part.is_file():
            return part.stat().st_size, note["version"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    _forget(part)  # of another address, or of unknown origin: nothing to build on
    return 0, None


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _note(part).unlink(missing_ok=True)


# ---------------------------------------------------------------------- data sets


@dataclass(frozen=True, kw_only=True)
class DatasetFile:
    """A file that may lie on a user's disk: recognised by its checksum, wherever it came from."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """One data set, as `clearhead data` lists it."""

    name: str
    task: str  # the task that reads it
    description: str
    license: str
    origin: str  # where it comes from, and how to get it where there is no address
    remotes: tuple[Download, ...] = ()
    copies: tuple[DatasetFile, ...] = ()

    @property
    def size(self) -> int | None:
        """The bytes of what is fetched (or of the known copies, where nothing is); None where not known."""
        sizes = [item.size for item in self.remotes or self.copies]
        return sum(size or 0 for size in sizes) if sizes and None not in sizes else None

    @property
    def verified(self) -> str:
        """How a fetched file is checked, in words."""
        if not self.remotes:
            return "nothing to fetch"
        if all(remote.sha256 for remote in self.remotes):
            return "sha256"
        return "structure only: no checksum is known"


def _known() -> Iterator[DatasetInfo]:
    """The table in known.toml. A remote file is called by the last part of its address, unless told otherwise."""
    table = tomllib.loads((Path(__file__).parent / "datasets.toml").read_text(encoding="utf-8"))
    for name, row in table.items():
        remotes = tuple(Download(**{"name": Path(file["url"]).name} | file) for file in row.pop("remotes", ()))
        copies = tuple(DatasetFile(**file) for file in row.pop("copies", ()))
        yield DatasetInfo(name=name, **row, remotes=remotes, copies=copies)


DATASETS: tuple[DatasetInfo, ...] = tuple(_known())


def get_dataset(name: str, known: Iterable[DatasetInfo] = DATASETS) -> DatasetInfo:
    """The data set of a name."""
    return lookup(name, {item.name: item for item in known}, "no data set is called")


def fetch(
    name: str | DatasetInfo, folder: Path | str, *, progress: Progress | None = None, tries: int = 5, pause: float = 1.0
) -> list[Path]:
    """Bring the files of a data set into a folder: resumed where it broke off, checked, whole or absent."""
    item = get_dataset(name) if isinstance(name, str) else name
    if not item.remotes:
        raise DataError(f"{item.name} has nothing to fetch: it comes from elsewhere ({item.origin})")
    paths = []
    for remote in item.remotes:
        path = fetch_file(remote, folder, progress=progress, tries=tries, pause=pause)
        if remote.sha256 is None:
            _check_structure(item, path)
        paths.append(path)
    return paths


def _check_structure(item: DatasetInfo, path: Path) -> None:
    """Read a file without a known checksum the way its task will; one that cannot be read is put aside."""
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
        aside = path.with_name(f"{path.name}.bad")
        path.replace(aside)
        raise StorageError(f"what arrived for {item.name} is not such data ({error}); it is kept as {aside}") from error


def identify(path: Path | str, known: Iterable[DatasetInfo] = DATASETS) -> tuple[DatasetInfo, str] | None:
    """The data set a local file belongs to and its usual name, by its checksum; None where it is unknown."""
    digest = files.sha256(Path(path))
    for item in known:
        kept: tuple[DatasetFile | Download, ...] = (*item.copies, *item.remotes)
        for file in kept:
            if file.sha256 == digest:
                return item, file.name
    return None
