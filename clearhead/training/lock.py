"""One process at a time trains in a run's folder: a lock of the operating system, which dies with whoever holds it.

The file `.lock` says who that is. It stays behind when the run ends, and then means nothing."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from clearhead.disk import refusals
from clearhead.errors import StorageError
from clearhead.training.distributed import World

FILE_NAME = ".lock"

if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[str]) -> None:
        file.seek(1 << 20)  # what is locked there cannot be read, so it is a byte that nobody reads
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def run_lock(folder: Path, world: World) -> Iterator[None]:
    """Hold a run's folder, or say who does. The first process holds it for all; all are refused together."""
    file, refused = None, None
    if world.is_first:
        try:
            file = _hold(folder)
        except StorageError as error:
            refused = str(error)
    if refused := world.broadcast(refused):
        raise StorageError(refused)
    try:
        yield
    finally:
        if file is not None:
            file.close()  # and with it the lock is given back


def _hold(folder: Path) -> IO[str]:
    """The locked file, which must be kept open."""
    with refusals(f"cannot train in {folder}", then="choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE_NAME).open("a+", encoding="utf-8")
        try:
            _take(file)
        except (BlockingIOError, PermissionError) as error:  # as POSIX and as Windows say it
            file.seek(0)
            try:
                who = "process {pid} on {host} since {since}".format_map(json.load(file))
            except (ValueError, TypeError, KeyError):  # it has just taken the lock, and not said yet who it is
                who = "another process"
            file.close()
            raise StorageError(
                f"{folder} is being trained by {who}; wait for its end, stop it, or train in another folder"
            ) from error
        except OSError as error:  # some network file systems have no locks, and training there is no fault
            words = f"{folder} cannot be locked ({error.strerror or error}): let one process at a time train in it"
            warnings.warn(words, RuntimeWarning, stacklevel=4)
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, file)
        file.flush()
    return file
