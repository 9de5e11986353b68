"""Tokenized text in files of ids, which are memory-mapped, for corpora of any size.

    shards/
      index.json        the shards in order: tokens, documents, SHA-256; bytes per id
      tokenizer.json
      00000.ids …       concatenated ids, little-endian, 2 bytes each (4 if the vocabulary needs them)

Each document ends in <eos>, which no text encodes to, so <eos> separates documents. The content of the shards depends
on the text only, not on the number of processes. An existing valid shard is not written again."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from clearhead._core.atomic_io import read_json, wrap_os_errors, write_atomically
from clearhead._core.validation import check_int
from clearhead.data import files
from clearhead.data.tokenizers.base import FILE_NAME, Tokenizer, load_tokenizer
from clearhead.errors import ConfigError, DataError, StorageError

if TYPE_CHECKING:
    import numpy as np

FORMAT = "clearhead shards 1"
INDEX = "index.json"
_BYTES_PER_SHARD = 32 << 20  # of text
_MAX_CHAR_BYTES = 4  # of a character in UTF-8


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Shards:
    """An opened folder of shards: one long sequence of ids, of which any part can be read.

    Args:
        folder: The folder.
        names: File names.
        lengths: Number of tokens of each file.
        n_documents: Number of documents.
        dtype: Type of the ids, "uint16" or "uint32".
    """

    folder: Path
    names: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of each
    n_documents: int
    dtype: str  # of the files: "uint16" or "uint32"

    @classmethod
    def open(cls, folder: Path | str) -> Shards:
        """Open a folder that `tokenize` has completed, and verify the checksums.

        Raises:
            StorageError: The folder is incomplete, or a file was modified.
        """
        folder = Path(folder)
        unfinished = "; expected a complete folder of shards: run `clearhead data tokenize` again"
        index = read_json(folder / INDEX, fallback=unfinished)
        try:
            if index["format"] != FORMAT or index["dtype"] not in ("uint16", "uint32"):
                raise KeyError("format")
            names = tuple(str(row["file"]) for row in index["shards"])
            lengths = tuple(int(row["tokens"]) for row in index["shards"])
            digests = [str(row["sha256"]) for row in index["shards"]]
            shards = cls(folder, names, lengths, int(index["documents"]), index["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"{folder / INDEX} is not an index of shards ({error}); create it with `tokenize`"
            ) from error
        with ThreadPoolExecutor() as pool:
            for name, expected, digest in zip(names, digests, pool.map(files.sha256, shards._paths()), strict=True):
                if digest != expected:
                    raise StorageError(f"{folder / name} was modified (its SHA-256 differs); tokenize again")
        return shards

    def _paths(self) -> list[Path]:
        if invalid := [name for name in self.names if Path(name).name != name]:
            raise StorageError(
                f"{self.folder / INDEX} contains the file {invalid[0]!r}; expected a name without folders"
            )
        return [self.folder / name for name in self.names]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the shards."""
        return load_tokenizer(self.folder)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.lengths))

    @cached_property
    def _maps(self) -> list[np.ndarray]:
        import numpy as np

        dtype = np.dtype(self.dtype).newbyteorder("<")
        empty = np.zeros(0, dtype)  # an empty file cannot be mapped
        sizes = zip(self._paths(), self.lengths, strict=True)
        return [np.memmap(path, dtype=dtype, mode="r", shape=(n,)) if n else empty for path, n in sizes]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the ids from `start` to `stop` as int64."""
        import numpy as np

        parts = []
        index = bisect_right(self._ends, start)
        while start < min(stop, len(self)):
            first = self._ends[index] - self.lengths[index]
            parts.append(self._maps[index][start - first : stop - first])
            start = self._ends[index]
            index += 1
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def is_shards(path: Path | str) -> bool:
    """Return whether a path is a folder of shards, complete or not."""
    return (Path(path) / INDEX).is_file() or any(Path(path).glob("*.ids"))


# ---------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _TextPart:
    """The text of one shard: a part of a file, cut where no token can cross."""

    number: int
    source: str
    content: bytes
    is_lines: bool  # of JSON, each with a text
    begins: bool  # whether it starts with a new document
    ends: bool  # whether its last document ends


def tokenize(
    paths: Sequence[Path | str],
    tokenizer: Tokenizer,
    out: Path | str,
    *,
    separator: str | None = None,
    processes: int | None = None,
    bytes_per_shard: int = _BYTES_PER_SHARD,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Shards:
    """Tokenize text files in UTF-8, possibly compressed, into shards; an interrupted call can be repeated to resume.

    A file is one document, unless `separator` lines divide it. In *.jsonl files each line is a document: an object with
    the field "text". Lines that are not UTF-8 are skipped and counted.

    Args:
        paths: The text files.
        tokenizer: The tokenizer, which is stored with the shards.
        out: Folder of the shards.
        separator: Line that separates documents, such as "<|endoftext|>".
        processes: Number of processes; by default one per core.
        bytes_per_shard: Approximate size of the text of a shard.
        progress: Called with the bytes done and the total.

    Returns:
        The opened shards.

    Raises:
        ConfigError: The separator is not a line of text.
        DataError: There is no text.
        StorageError: The folder contains other files, or a file cannot be read.
    """
    sources = [Path(path) for path in paths]
    if not sources:
        raise DataError("no file to tokenize; expected at least one")
    if separator is not None and (not separator.strip() or "\n" in separator):
        raise ConfigError(f"separator is {separator!r}; expected the text of a line")
    check_int(bytes_per_shard, "bytes_per_shard", minimum=1)
    processes = os.cpu_count() or 1 if processes is None else check_int(processes, "processes", minimum=1)
    total = sum(files.require_file(path).stat().st_size for path in sources)
    folder = Path(out)
    with wrap_os_errors(f"cannot write shards to {folder}", advice="choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        _prepare_folder(folder, tokenizer)
    processes = min(processes, -(-total // bytes_per_shard) or 1)
    records = []
    done = 0
    parts = _text_parts(sources, separator, bytes_per_shard)
    for part, record in _shard_records(parts, folder, separator, tokenizer, processes):
        records.append(record)
        done += len(part.content)
        progress(min(done, total), total)  # the content of compressed files is larger than the files
    if not sum(record["tokens"] for record in records):
        raise DataError(f"{', '.join(path.name for path in sources)}: the files contain no text")
    _finish(folder, _dtype(tokenizer), records)
    return Shards.open(folder)


def _dtype(tokenizer: Tokenizer) -> str:
    """Return the smallest dtype that contains all ids."""
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def _prepare_folder(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise if the folder contains other files; store the tokenizer; make an existing index resumable."""
    for name in (path.name for path in folder.iterdir()):
        if name not in (INDEX, FILE_NAME) and not re.fullmatch(r"\.?\d{5,}\.(ids|json)(\.\w+)?", name):
            raise StorageError(f"{folder} contains {name}, which is not part of a set of shards; choose another folder")
    if (folder / FILE_NAME).is_file() and load_tokenizer(folder).to_json() != tokenizer.to_json():
        raise StorageError(f"{folder} contains shards of another tokenizer; choose another folder or remove it")
    tokenizer.save(folder)
    if (folder / INDEX).is_file():
        # The index is written again at the end; unchanged shards are recognized by their records.
        records = read_json(folder / INDEX).get("shards")
        for record in records if isinstance(records, list) else []:
            name = str(record.get("file")) if isinstance(record, dict) else ""
            if re.fullmatch(r"\d{5,}\.ids", name):
                write_atomically((folder / name).with_suffix(".json"), json.dumps(record).encode())
        (folder / INDEX).unlink()


class ShardRecord(TypedDict):
    """Record of a shard in the index; `mark` is a hash of everything that determines its ids."""

    file: str
    source: str
    tokens: int
    documents: int
    skipped: int
    sha256: str
    mark: str


def _finish(folder: Path, dtype: str, records: list[ShardRecord]) -> None:
    """Write the index and remove files that are not part of it."""
    index = {
        "format": FORMAT,
        "dtype": dtype,
        "tokens": sum(record["tokens"] for record in records),
        "documents": sum(record["documents"] for record in records),
        "skipped_lines": sum(record["skipped"] for record in records),
        "shards": records,
    }
    names = {record["file"] for record in records}
    for path in folder.glob("*.ids"):
        if path.name not in names:  # of an earlier, longer text
            path.unlink()
    write_atomically(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    for path in folder.glob("[0-9]*.json"):
        path.unlink()


def _text_parts(sources: Sequence[Path], separator: str | None, bytes_per_shard: int) -> Iterator[_TextPart]:
    """Cut the files into the texts of the shards."""
    ends_with_separator = (
        None if separator is None else re.compile(rb"(?:\A|\n)" + re.escape(separator.encode()) + rb"\n\Z")
    )
    number = 0
    for path in sources:
        is_lines = ".jsonl" in path.suffixes
        begins = True
        for content, ends in _cut(path, bytes_per_shard, anywhere=is_lines):
            yield _TextPart(number, path.name, content, is_lines, begins, ends)
            begins = ends_with_separator is not None and ends_with_separator.search(content) is not None
            number += 1


def _cut(path: Path, bytes_per_shard: int, *, anywhere: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield parts of about `bytes_per_shard` bytes and whether each is the last, with LF line ends."""
    with files.open_bytes(path) as file:
        pending = b""
        is_first = True
        while block := file.read(bytes_per_shard):
            pending = (pending + (block.removeprefix(files.BOM) if is_first else block)).replace(b"\r\n", b"\n")
            is_first = False
            if (cut := _last_cut(pending, anywhere)) and len(pending) >= bytes_per_shard:
                yield pending[:cut], False
                pending = pending[cut:]
        yield pending, True


def _last_cut(content: bytes, anywhere: bool) -> int:
    """Return the index after the last line end that no token can cross, or 0."""
    end = content.rfind(b"\n", 0, len(content) - _MAX_CHAR_BYTES)
    while end > 0:
        before = content[max(0, end - _MAX_CHAR_BYTES) : end].decode(errors="ignore")[-1:]
        after = content[end + 1 : end + 1 + _MAX_CHAR_BYTES].decode(errors="ignore")[:1]
        if anywhere or (before.strip() and after.strip()):
            return end + 1
        end = content.rfind(b"\n", 0, end)
    return 0


def _shard_records(
    parts: Iterator[_TextPart], folder: Path, separator: str | None, tokenizer: Tokenizer, processes: int
) -> Iterator[tuple[_TextPart, ShardRecord]]:
    """Write the shards, in parallel, and yield each part with its record, in order."""
    if processes == 1:
        yield from ((part, _write_shard(part, folder, separator, tokenizer)) for part in parts)
        return
    # Spawned, because the threads of the library do not survive a fork.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[tuple[_TextPart, Future[ShardRecord]]] = deque()
        for part in parts:
            waiting.append((part, pool.submit(_write_shard, part, folder, separator)))
            if len(waiting) > 2 * processes:
                first, future = waiting.popleft()
                yield first, future.result()
        yield from ((first, future.result()) for first, future in waiting)


@cache  # once per process
def _load_worker_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer in a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return load_tokenizer(folder)


def _write_shard(
    part: _TextPart, folder: Path, separator: str | None, tokenizer: Tokenizer | None = None
) -> ShardRecord:
    """Write a shard and its record, or return the record of an existing valid shard."""
    import numpy as np

    tokenizer = _load_worker_tokenizer(folder) if tokenizer is None else tokenizer
    path = folder / f"{part.number:05d}.ids"
    record_path = path.with_suffix(".json")
    settings = json.dumps([tokenizer.to_json(), separator, part.is_lines, part.begins, part.ends])
    fingerprint = hashlib.sha256(settings.encode() + part.content).hexdigest()  # of everything that determines the ids
    if record_path.is_file() and path.is_file():
        existing: ShardRecord = read_json(record_path)
        if existing.get("mark") == fingerprint and files.sha256(path) == existing.get("sha256"):
            return existing
    texts, skipped = _texts(part, separator)
    ids: list[np.ndarray] = [np.zeros(0, np.int64)]
    n_documents = 0
    for i, text in enumerate(texts):
        ids.append(tokenizer.encode_long(text).numpy())
        is_last = i == len(texts) - 1
        # An empty text ends a document only if the document started in the previous part.
        if (not is_last or part.ends) and (text or (i == 0 and not part.begins and not part.is_lines)):
            ids.append(np.array([tokenizer.eos_id], np.int64))
            n_documents += 1
    content = np.concatenate(ids)
    raw = content.astype(np.dtype(_dtype(tokenizer)).newbyteorder("<")).tobytes()
    write_atomically(path, raw)
    record: ShardRecord = {
        "file": path.name,
        "source": part.source,
        "tokens": len(content),
        "documents": n_documents,
        "skipped": skipped,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "mark": fingerprint,
    }
    write_atomically(record_path, json.dumps(record).encode())
    return record


def _texts(part: _TextPart, separator: str | None) -> tuple[list[str], int]:
    """Return the texts of a part, all but the last ending a document, and the number of skipped lines."""
    if part.is_lines:
        lines = [line for line in part.content.split(b"\n") if line.strip()]
        texts = [text for line in lines if (text := _text_of(line)) is not None]
        return [*texts, ""], len(lines) - len(texts)  # no document continues after the last line
    text, _, invalid = files.decode_lines(part.content)
    if separator is None:
        return [text], len(invalid)
    return re.split(rf"^{re.escape(separator)}(?:\n|\Z)", text, flags=re.MULTILINE), len(invalid)


def _text_of(line: bytes) -> str | None:
    """Return the text in a line of JSON, or None if there is none that can be encoded."""
    try:
        text: str = json.loads(line)["text"]
        text.encode()  # an escape may be half a surrogate pair
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return text
