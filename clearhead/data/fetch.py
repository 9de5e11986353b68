"""Fetching a file so that it is whole or not there, and a broken-off fetch goes on where it stopped.

What has arrived stays in `NAME.part`; the server is asked for the rest of it. Only a file of the right size and
checksum gets its real name. Nothing but the standard library is used."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clearhead.data import files
from clearhead.disk import write_atomically
from clearhead.errors import ConfigError, StorageError

Progress = Callable[[int, int | None], None]
"""Called with the bytes there and, where known, the bytes in all."""

_CHUNK = 1 << 16
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file somewhere: its address, its name here, and what it must be. An unknown checksum is None."""

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"address {self.url!r}: expected http:// or https://")
        if Path(self.name).name != self.name:
            raise ConfigError(f"file name {self.name!r}: expected a plain name without folders")


class _BrokenOffError(Exception):
    """The connection ended before the file did: worth another try."""


def fetch_file(
    remote: Remote,
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
        except (_BrokenOffError, urllib.error.URLError, http.client.HTTPException, OSError) as error:
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


def _why_wrong(remote: Remote, path: Path) -> str | None:
    """What a file is instead of the one that is known; None where it is that."""
    if remote.size is not None and (size := path.stat().st_size) != remote.size:
        return f"{size:,} bytes, expected {remote.size:,}: it is not the file that is known"
    if remote.sha256 is not None and (got := files.sha256(path)) != remote.sha256:
        return f"a file with sha256 {got}, expected {remote.sha256}: it is thrown away"
    return None


def _continue(remote: Remote, part: Path, *, timeout: float, progress: Progress | None) -> None:
    """Ask for what is missing and add it; return when the file is all there."""
    have, version = _what_is_there(remote, part)
    if remote.size is not None and have == remote.size:
        return
    headers = {"User-Agent": "clearhead", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if version:
            headers["If-Range"] = version  # a file that has changed since is sent anew and whole
    request = urllib.request.Request(remote.url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_NOT_SATISFIABLE and have:
            _forget(part)
            raise _BrokenOffError("the server has no more than what is there; starting anew") from error
        raise
    with answer:
        if answer.status == 206:
            start, total = _content_range(answer.headers.get("Content-Range", ""))
            if start != have:
                _forget(part)
                raise _BrokenOffError(f"asked for the bytes from {have}, got those from {start}; starting anew")
        else:
            have, total = 0, _number(answer.headers.get("Content-Length"))
        _remember(part, remote, answer.headers.get("ETag") or answer.headers.get("Last-Modified"))
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
        raise _BrokenOffError(f"the connection ended at byte {have:,} of {total:,}")


def _content_range(value: str) -> tuple[int, int | None]:
    """`bytes 5-9/10` → (5, 10)."""
    place, _, total = value.removeprefix("bytes ").partition("/")
    start = _number(place.partition("-")[0])
    return -1 if start is None else start, _number(total)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _remember(part: Path, remote: Remote, version: str | None) -> None:
    strong = version if version and not version.startswith("W/") else None  # a weak tag may not be used with ranges
    write_atomically(_note(part), json.dumps({"url": remote.url, "version": strong}).encode())


def _what_is_there(remote: Remote, part: Path) -> tuple[int, str | None]:
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
