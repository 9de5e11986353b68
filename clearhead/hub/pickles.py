"""Convert checkpoints that are pickles to folders of safetensors.

A pickle is a program that builds objects, so clearhead never opens one in its own process. `convert_pickle` reads it in
a separate process (`unpickle_worker.py`) that accepts tensors and plain values only and has limits on memory, time and
files. Checkpoints of OpenAI's Whisper, which have other names and no configuration, become folders of transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead._core.atomic_io import read_json, wrap_os_errors
from clearhead.data.tokenizers.sentencepiece import FILES as SENTENCE_PIECE_FILES
from clearhead.errors import StorageError
from clearhead.hub import whisper_checkpoint
from clearhead.hub.formats import CONFIG, INDEX, PICKLE_SUFFIXES, WEIGHTS
from clearhead.hub.tokenizer_files import COMPANIONS
from clearhead.models import storage

_WORKER = Path(__file__).with_name("unpickle_worker.py")
_MAX_SECONDS = 3_600
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_PICKLE = "pytorch_model.bin"
_OTHER_FILES = (CONFIG, "modules.json", "sentence_bert_config.json", f"1_Pooling/{CONFIG}", *SENTENCE_PIECE_FILES)


@dataclass(frozen=True)
class Conversion:
    """The result of `convert_pickle`.

    Attributes:
        folder: The folder.
        files: Names of its files.
        notes: Sentences that name files that are missing for loading or using the folder.
    """

    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def convert_pickle(
    source: str | Path,
    folder: str | Path,
    *,
    vocabulary: str | Path | None = None,
    model_type: str | None = None,
) -> Conversion:
    """Convert a checkpoint that is a pickle to a folder of safetensors.

    Configuration and tokenizer files next to the checkpoint are copied.

    Args:
        source: A file (.bin, .pt, .pth, .ckpt or .pkl), or a folder that contains pytorch_model.bin or its shards.
        folder: A folder that does not exist or is empty.
        vocabulary: For OpenAI's Whisper, the list of ranks that its tokenizer is built from (gpt2.tiktoken or
            multilingual.tiktoken).
        model_type: Written to config.json, for configurations of early versions of transformers that lack it.

    Returns:
        The folder, its files, and notes about missing files.

    Raises:
        StorageError: If the file is missing, corrupted or not a checkpoint, or the folder is not empty.

    Example:
        convert_pickle("rxnfp/pytorch_model.bin", "rxnfp-safetensors")
    """
    files = _checkpoint_files(Path(source))
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"{folder} already exists and is not empty; give a new folder")
    with wrap_os_errors(f"cannot write to {folder}", advice="nothing was written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as parent:
            new = Path(parent, folder.name)
            new.mkdir()
            sizes = _convert_files(files, new)
            if sizes is None:
                notes = _copy_companions(files[0].parent, new, model_type)
            else:
                notes = whisper_checkpoint.write_folder(new, sizes, None if vocabulary is None else Path(vocabulary))
            if folder.exists():
                folder.rmdir()  # empty, as checked above
            new.rename(folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return Conversion(folder, tuple(names), notes)


def _checkpoint_files(source: Path) -> list[Path]:
    """Return the pickles of a checkpoint: the file itself, or those of a folder."""
    if source.is_file():
        if source.suffix not in PICKLE_SUFFIXES:
            raise StorageError(f"{source} is not a pickle; expected a name that ends in {', '.join(PICKLE_SUFFIXES)}")
        return [source]
    if not source.is_dir():
        raise StorageError(f"there is no {source}; expected a checkpoint file, or a folder that contains {_PICKLE}")
    if (index := source / _PICKLE_INDEX).is_file():
        table = read_json(index).get("weight_map")
        names = sorted(set(table.values())) if isinstance(table, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise StorageError(f"{index} has no weight_map from names to files of this folder: download it again")
        if missing := [name for name in names if not (source / name).is_file()]:
            raise StorageError(f"{source} has no {missing[0]}, which {_PICKLE_INDEX} lists: one shard is missing")
        return [source / name for name in names]
    if not (source / _PICKLE).is_file():
        raise StorageError(f"{source} contains no {_PICKLE}; give the checkpoint file")
    return [source / _PICKLE]


def _convert_files(files: Sequence[Path], folder: Path) -> dict[str, int] | None:
    """Write the tensors of the files to a folder, and return the sizes of a Whisper model, or None for others."""
    if len(files) == 1:
        return _run_worker(files[0], folder / WEIGHTS)
    file_of: dict[str, str] = {}
    for i, file in enumerate(files, start=1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        _run_worker(file, folder / name)
        with storage.open_safetensors(folder / name, "cpu") as opened:
            file_of |= dict.fromkeys(opened.keys(), name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}, indent=1), encoding="utf-8")
    return None


def _run_worker(source: Path, target: Path) -> dict[str, int] | None:
    """Convert one file in the separate process."""
    environment = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    request = json.dumps({"source": str(source.resolve()), "target": str(target.resolve())})
    command = [sys.executable, "-I", str(_WORKER)]  # -I: import nothing from this folder or the environment
    response: Mapping[str, object]
    try:
        process = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            timeout=_MAX_SECONDS,
            check=False,
            env=environment,
            cwd=target.parent,
        )
        response = json.loads(process.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        response = {"error": "its process exceeded the limit of time, memory or file size"}
    if "error" in response:
        raise StorageError(f"{source} cannot be converted: {response['error']}; nothing was written")
    sizes = response.get("dims")
    return sizes if isinstance(sizes, dict) else None


def _copy_companions(source: Path, folder: Path, model_type: str | None) -> tuple[str, ...]:
    """Copy configuration and tokenizer files; return notes about missing files."""
    for name in (*COMPANIONS, *_OTHER_FILES):
        if (source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    if not (folder / CONFIG).is_file():
        return (f"{source} has no {CONFIG}, which a model needs: copy it to the folder",)
    config = read_json(folder / CONFIG)
    if model_type is not None:
        config["model_type"] = model_type
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if "model_type" not in config:
        return (f"{CONFIG} has no model_type: convert again to a new folder with --model-type, such as bert",)
    return ()
