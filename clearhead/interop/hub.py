"""Models by their name on the Hugging Face hub: `hf:org/name`, or `hf:org/name@revision`, in the hub's own cache.

What is in the cache is used without asking the network. Only files that are data are fetched, never code or pickles."""

from __future__ import annotations

import re
from pathlib import Path

from clearhead.errors import MissingDependencyError, StorageError

PREFIX = "hf:"
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "spiece.model", "*.spm"]


def fetch(name: str) -> Path:
    """The folder of a model in the hub's cache, downloaded where it is not there yet."""
    found = re.fullmatch(rf"{PREFIX}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if found is None:
        raise StorageError(
            f"{name!r} is no name on the hub; expected hf:organisation/name, or hf:organisation/name@revision"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise MissingDependencyError(f"{name} needs huggingface_hub: pip install 'clearhead[weights]'") from error
    repository, revision = found.groups()
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=_WANTED, local_files_only=True))
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError:
        pass  # not here yet
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_WANTED))
    except Exception as error:  # the library's errors, those of its transport and those of the disk
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StorageError(f"{name} is not in the hub's cache and cannot be fetched: {reason[0]}") from error
