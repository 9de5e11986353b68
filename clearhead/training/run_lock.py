"""Lock the folder of a run with a lock of the operating system, which is released when its process ends.

The file `.lock` contains the process id and host of the owner. It remains when the run ends, without a meaning."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from clearhead._core.atomic_io import wrap_os_errors
from clearhead.errors import StorageError
from clearhead.training.distributed import World

FILE_NAME = ".lock"

if sys.platform == "win32":
    import msvcrt

    def lock_file(file: IO[str]) -> None:
        """Lock an open file, or raise an OSError if another process has locked it."""
        file.seek(1 << 20)  # a locked byte cannot be read, so lock one beyond the content
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def lock_file(file: IO[str]) -> None:
        """Lock an open file, or raise an OSError if another process has locked it."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def run_lock(folder: Path, world: World, *, lock: Callable[[IO[str]], None] = lock_file) -> Iterator[None]:
    """Lock a run's folder. The first process holds the lock for all processes.

    Args:
        folder: The folder; created if necessary.
        world: The processes of the run.
        lock: Function that locks an open file.

    Raises:
        StorageError: Another process trains in the folder; raised in all processes.
    """
    file, message = None, None
    if world.is_first:
        try:
            file = _acquire(folder, lock)
        except StorageError as error:
            message = str(error)
    if message := world.broadcast(message):
        raise StorageError(message)
    try:
        yield
    finally:
        if file is not None:
            file.close()  # releases the lock


def _acquire(folder: Path, lock: Callable[[IO[str]], None]) -> IO[str]:
    """Return the locked file, which must stay open."""
    with wrap_os_errors(f"cannot train in {folder}", advice="choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE_NAME).open("a+", encoding="utf-8")
        try:
            lock(file)
        except (BlockingIOError, PermissionError) as error:  # POSIX and Windows
            file.seek(0)
            try:
                owner = "process {pid} on {host} since {since}".format_map(json.load(file))
            except (ValueError, TypeError, KeyError):  # it has not written the file yet
                owner = "another process"
            file.close()
            raise StorageError(
                f"{folder} is being trained by {owner}; wait for its end, stop it, or train in another folder"
            ) from error
        except OSError as error:  # some network file systems have no locks
            words = f"{folder} cannot be locked ({error.strerror or error}): let one process at a time train in it"
            warnings.warn(words, RuntimeWarning, stacklevel=4)
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, file)
        file.flush()
    return file
