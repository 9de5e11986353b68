"""Writing files that are never half there, and saying in one sentence what the system refuses or a file lacks.

A file is written under another name, forced to the disk, and then renamed. Its mode follows the umask, as if a
program had simply opened it."""

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
def refusals(what: str, then: str = "what was there before is untouched") -> Iterator[None]:
    """Around writing: what the system refuses (a full disk, a folder of others) is one `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror or error}; {then}") from error


def read_json(path: Path, kind: type = dict, *, otherwise: str = "") -> Any:
    """The object (or list) in a JSON file; where there is no file, `otherwise` is said of it."""
    if not path.is_file():
        raise StorageError(f"there is no {path}{otherwise}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, kind):
        expected = "an object" if kind is dict else "a list"
        raise StorageError(f"{path} holds a {type(data).__name__}; expected {expected}")
    return data


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target and rename: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with refusals(f"cannot write {path}"):
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
    """A safetensors file, in place as it grows; an `OSError` where the system refuses it, which leaves none."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # of a file that was simply opened; safetensors makes one for its owner alone
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
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
