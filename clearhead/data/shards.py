"""Tokenized text in files of ids, mapped into memory and never loaded: corpora of any size.

    shards/
      index.json        the shards in order: tokens, documents, SHA-256; how many bytes an id takes
      tokenizer.json
      00000.ids …       ids end to end, little-endian, 2 bytes each (4 where the vocabulary needs them)

Each document ends in <eos>, which no text can write, so that its ids tell where documents part. What lies in
which shard depends on the text alone, not on how many processes made them; a shard that is there already is not
made again."""

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
from typing import TYPE_CHECKING, Any

from clearhead._core.atomic_io import read_json, write_atomically
from clearhead.data import files
from clearhead.data.tokenizers.base import FILE_NAME, Tokenizer, load_tokenizer
from clearhead.errors import ConfigError, DataError, StorageError

if TYPE_CHECKING:
    import numpy as np

FORMAT = "clearhead shards 1"
INDEX = "index.json"
_BYTES_AT_ONCE = 32 << 20  # of text to a shard
_MAY_BE_CUT = 4  # bytes of the longest character


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Shards:
    """A folder of shards, opened: its ids end to end, as one long row of which any part can be read."""

    folder: Path
    names: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of each
    n_documents: int
    dtype: str  # of the files: "uint16" or "uint32"

    @classmethod
    def open(cls, folder: Path | str) -> Shards:
        """The shards of a folder that `tokenize` has finished; every file is compared with its checksum."""
        folder = Path(folder)
        unfinished = ": expected a folder of shards that is finished; run `clearhead data tokenize` again"
        index = read_json(folder / INDEX, fallback=unfinished)
        try:
            if index["format"] != FORMAT or index["dtype"] not in ("uint16", "uint32"):
                raise KeyError("format")
            names = tuple(str(row["file"]) for row in index["shards"])
            lengths = tuple(int(row["tokens"]) for row in index["shards"])
            wanted = [str(row["sha256"]) for row in index["shards"]]
            found = cls(folder, names, lengths, int(index["documents"]), index["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{folder / INDEX} is no index of shards: {error}; make it with `tokenize`") from error
        with ThreadPoolExecutor() as pool:
            for name, own, got in zip(names, wanted, pool.map(files.sha256, found._paths()), strict=True):
                if got != own:
                    raise StorageError(f"{folder / name} is not what was written (its SHA-256 differs): tokenize again")
        return found

    def _paths(self) -> list[Path]:
        if odd := [name for name in self.names if Path(name).name != name]:
            raise StorageError(f"{self.folder / INDEX} names {odd[0]!r}, expected a file in the folder itself")
        return [self.folder / name for name in self.names]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the shards, from their folder."""
        return load_tokenizer(self.folder)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.lengths))

    @cached_property
    def _maps(self) -> list[Any]:
        import numpy as np

        kind = np.dtype(self.dtype).newbyteorder("<")
        empty = np.zeros(0, kind)  # nothing can be mapped there
        sizes = zip(self._paths(), self.lengths, strict=True)
        return [np.memmap(path, dtype=kind, mode="r", shape=(n,)) if n else empty for path, n in sizes]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from `start` up to `stop`, as int64; only what is asked for is read from the disk."""
        import numpy as np

        parts = []
        at = bisect_right(self._ends, start)
        while start < min(stop, len(self)):
            first = self._ends[at] - self.lengths[at]
            parts.append(self._maps[at][start - first : stop - first])
            start, at = self._ends[at], at + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def is_shards(path: Path | str) -> bool:
    """Whether a path is a folder of shards (perhaps unfinished)."""
    return (Path(path) / INDEX).is_file() or any(Path(path).glob("*.ids"))


# ---------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _Piece:
    """A part of one file, cut where no token can reach across."""

    number: int
    source: str
    content: bytes
    is_lines: bool  # of JSON, each with a text
    begins: bool  # with a document, of which nothing is in the piece before
    ends: bool  # its last document


def tokenize(
    paths: Sequence[Path | str],
    tokenizer: Tokenizer,
    out: Path | str,
    *,
    separator: str | None = None,
    processes: int | None = None,
    bytes_per_shard: int = _BYTES_AT_ONCE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Shards:
    """Make shards of text files in UTF-8 (which may be compressed), one process a shard; go on where it broke off.

    A file is one document. Lines that are `separator` (such as "<|endoftext|>") part a file into many, and in a file
    *.jsonl each line is one: an object with the field "text". Lines that are not UTF-8 are left out and counted."""
    sources = [Path(path) for path in paths]
    if not sources:
        raise DataError("no file to tokenize: give at least one")
    if separator is not None and (not separator.strip() or "\n" in separator):
        raise ConfigError(f"separator {separator!r}: expected the text of a line")
    total, folder = sum(files.require_file(path).stat().st_size for path in sources), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, tokenizer)
    processes = min(processes or os.cpu_count() or 1, -(-total // bytes_per_shard) or 1)
    records, done = [], 0
    for piece, record in _worked(_pieces(sources, separator, bytes_per_shard), folder, separator, tokenizer, processes):
        records.append(record)
        done += len(piece.content)
        progress(min(done, total), total)  # compressed files have more to give than they are long
    if not sum(record["tokens"] for record in records):
        raise DataError(f"{', '.join(path.name for path in sources)}: there is no text in it")
    _finish(folder, _dtype(tokenizer), records)
    return Shards.open(folder)


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def _claim(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuse a folder that holds something else; write down the tokenizer, without which ids mean nothing."""
    for name in (path.name for path in folder.iterdir()):
        if name not in (INDEX, FILE_NAME) and not re.fullmatch(r"\.?\d{5,}\.(ids|json)(\.\w+)?", name):
            raise StorageError(f"{folder} holds {name}, which is no part of a set of shards; choose another folder")
    if (folder / FILE_NAME).is_file() and load_tokenizer(folder).to_json() != tokenizer.to_json():
        raise StorageError(f"{folder} has shards of another tokenizer; choose another folder, or remove it")
    tokenizer.save(folder)
    if (folder / INDEX).is_file():
        # It is whole again when all its shards are; those that need no change are known by their records.
        for record in read_json(folder / INDEX).get("shards", []):
            write_atomically((folder / str(record["file"])).with_suffix(".json"), json.dumps(record).encode())
        (folder / INDEX).unlink()


def _finish(folder: Path, dtype: str, records: list[dict[str, Any]]) -> None:
    index: dict[str, Any] = {"format": FORMAT, "dtype": dtype}
    for name, own in (("tokens", "tokens"), ("documents", "documents"), ("skipped_lines", "skipped")):
        index[name] = sum(record[own] for record in records)
    index["shards"] = records
    kept = {record["file"] for record in records}
    for left in (left for left in folder.glob("*.ids") if left.name not in kept):
        left.unlink()  # of a longer text, before
    write_atomically(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    for left in folder.glob("[0-9]*.json"):
        left.unlink()


def _pieces(sources: Sequence[Path], separator: str | None, at_once: int) -> Iterator[_Piece]:
    parts = None if separator is None else re.compile(rb"(?:\A|\n)" + re.escape(separator.encode()) + rb"\n\Z")
    number = 0
    for path in sources:
        is_lines = ".jsonl" in path.suffixes
        begins = True
        for content, ends in _cut(path, at_once, anywhere=is_lines):
            yield _Piece(number, path.name, content, is_lines, begins, ends)
            begins, number = parts is not None and parts.search(content) is not None, number + 1


def _cut(path: Path, at_once: int, *, anywhere: bool) -> Iterator[tuple[bytes, bool]]:
    """A file in parts of about `at_once` bytes, and which is the last: line ends as LF, without a byte order mark."""
    with files.open_bytes(path) as file:
        left, is_first = b"", True
        while block := file.read(at_once):
            left = (left + (block.removeprefix(files.BOM) if is_first else block)).replace(b"\r\n", b"\n")
            is_first = False
            if (cut := _last_cut(left, anywhere)) and len(left) >= at_once:
                yield left[:cut], False
                left = left[cut:]
        yield left, True


def _last_cut(content: bytes, anywhere: bool) -> int:
    """The place after the last line end over which no token can reach; 0 where there is none."""
    end = content.rfind(b"\n", 0, len(content) - _MAY_BE_CUT)
    while end > 0:
        before = content[max(0, end - _MAY_BE_CUT) : end].decode(errors="ignore")[-1:]
        after = content[end + 1 : end + 1 + _MAY_BE_CUT].decode(errors="ignore")[:1]
        if anywhere or (before.strip() and after.strip()):
            return end + 1
        end = content.rfind(b"\n", 0, end)
    return 0


def _worked(
    pieces: Iterator[_Piece], folder: Path, separator: str | None, tokenizer: Tokenizer, processes: int
) -> Iterator[tuple[_Piece, dict[str, Any]]]:
    """Every piece with its record, in order, a few ahead of the one that is asked for."""
    if processes == 1:
        yield from ((piece, _made(piece, folder, separator, tokenizer)) for piece in pieces)
        return
    # Started anew rather than forked: the library's threads do not survive a fork.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[tuple[_Piece, Future[dict[str, Any]]]] = deque()
        for piece in pieces:
            waiting.append((piece, pool.submit(_made, piece, folder, separator)))
            if len(waiting) > 2 * processes:
                first, future = waiting.popleft()
                yield first, future.result()
        yield from ((first, future.result()) for first, future in waiting)


@cache  # once in a process
def _tokenizer_there(folder: Path) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return load_tokenizer(folder)


def _made(piece: _Piece, folder: Path, separator: str | None, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Write one shard and, after it, its record; or give the record of one that is there."""
    import numpy as np

    tokenizer = _tokenizer_there(folder) if tokenizer is None else tokenizer
    path = folder / f"{piece.number:05d}.ids"
    beside = path.with_suffix(".json")
    how = json.dumps([tokenizer.to_json(), separator, piece.is_lines, piece.begins, piece.ends])
    mark = hashlib.sha256(how.encode() + piece.content).hexdigest()  # of all that decides the ids
    if beside.is_file() and path.is_file():
        record = read_json(beside)
        if record.get("mark") == mark and files.sha256(path) == record.get("sha256"):
            return record
    texts, skipped = _texts(piece, separator)
    ids: list[np.ndarray] = [np.zeros(0, np.int64)]
    n_documents = 0
    for i, text in enumerate(texts):
        ids.append(tokenizer.encode_long(text).numpy())
        is_last = i == len(texts) - 1
        # A text of nothing ends a document only if that began in the piece before.
        if (not is_last or piece.ends) and (text or (i == 0 and not piece.begins and not piece.is_lines)):
            ids.append(np.array([tokenizer.eos_id], np.int64))
            n_documents += 1
    content = np.concatenate(ids)
    raw = content.astype(np.dtype(_dtype(tokenizer)).newbyteorder("<")).tobytes()
    write_atomically(path, raw)
    record = {"file": path.name, "source": piece.source, "tokens": len(content), "documents": n_documents}
    record |= {"skipped": skipped, "sha256": hashlib.sha256(raw).hexdigest(), "mark": mark}
    write_atomically(beside, json.dumps(record).encode())
    return record


def _texts(piece: _Piece, separator: str | None) -> tuple[list[str], int]:
    """The texts of a piece, each but the last a whole document or the end of one; and how many lines were left out."""
    if piece.is_lines:
        lines = [line for line in piece.content.split(b"\n") if line.strip()]
        texts = [text for line in lines if (text := _text_of(line)) is not None]
        return [*texts, ""], len(lines) - len(texts)  # nothing is left open after the last line
    text, _, bad = files.decode_lines(piece.content)
    if separator is None:
        return [text], len(bad)
    return re.split(rf"^{re.escape(separator)}(?:\n|\Z)", text, flags=re.MULTILINE), len(bad)


def _text_of(line: bytes) -> str | None:
    """The text in a line of JSON; None where there is none."""
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None
