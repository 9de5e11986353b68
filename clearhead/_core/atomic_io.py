"""Atomic file writes, and operating-system errors as one-sentence `StorageError`s.

A file is written under a temporary name, synced to disk and then renamed. Its mode follows the umask."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import StorageError

if TYPE_CHECKING:
    from torch import Tensor


@contextlib.contextmanager
def wrap_os_errors(message: str, advice: str = "existing files are unchanged") -> Iterator[None]:
    """Convert an OSError raised while writing (a full disk, a read-only folder) to a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{message}: {error.strerror or error}; {advice}") from error


def read_json(path: Path, kind: type = dict, *, fallback: str = "") -> Any:
    """Return the object (or list) in a JSON file; `fallback` is appended to the message if the file is missing."""
    if not path.is_file():
        raise StorageError(f"there is no {path}{fallback}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, kind):
        expected = "an object" if kind is dict else "a list"
        raise StorageError(f"{path} contains a {type(data).__name__}; expected {expected}")
    return data


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder and rename it, so that readers see the old or the new file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with wrap_os_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(content)
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file directly at `path` (not atomically); on error, remove it and raise.

    Errors of the operating system, which safetensors wraps in its own class, are raised as OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # the umask's; safetensors would create a file that only its owner can read
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
        path.chmod(mode)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if not isinstance(error, SafetensorError):
            raise
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(*(int(number[1]), os.strerror(int(number[1]))) if number else (str(error),)) from error


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
