"""Translation: sentence pairs from a file of lines `source TAB target` (further columns are ignored).

The source is its tokens and <eos>. The target input is <bos> and its tokens; the labels are the tokens and <eos>. The
validation part is selected by source sentence, so all translations of a sentence are in the same part."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor

from clearhead._core.shapes import Int
from clearhead._core.validation import OpenUnit, validate
from clearhead.data import files
from clearhead.data.batch import PackedPairBatch, PairBatch, Split
from clearhead.data.files import RowReport
from clearhead.data.packing import Ragged, length_mask
from clearhead.data.tokenizers.base import Tokenizer
from clearhead.data.tokenizers.library import train_bpe
from clearhead.errors import DataError, StorageError

_MAX_LINE_BYTES = 1 << 16
_TRAIN_NAMES = ("train.tsv", "train.txt", "spa.txt", "spa-eng.zip", "nmt-0.0.6.tar.gz")
_VALIDATION_NAMES = ("dev.tsv", "valid.tsv", "validation.tsv", "dev.txt", "valid.txt", "validation.txt")


@dataclass(frozen=True, kw_only=True)
class SentencePairs:
    """The valid rows of a file, with their line numbers."""

    rows: Sequence[tuple[str, str, int]]  # source, target, line (0 if not from a file)
    report: RowReport

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sources(self) -> list[str]:
        return [source for source, _, _ in self.rows]

    @property
    def targets(self) -> list[str]:
        return [target for _, target, _ in self.rows]

    @property
    def lines(self) -> list[int]:
        return [line for _, _, line in self.rows]

    def select(self, keep: Iterable[bool]) -> SentencePairs:
        """Return the rows for which `keep` is True; the report does not change."""
        return replace(self, rows=list(compress(self.rows, keep)))


def read_pairs(path: Path | str, *, swap: bool = False) -> SentencePairs:
    """Read a file of sentence pairs. Bad rows are skipped and reported.

    Args:
        path: A file with one pair per line, separated by a tab.
        swap: Whether the second column is the source.

    Returns:
        The pairs, and a report of the skipped rows.
    """
    path = Path(path)
    rows: list[tuple[str, str, int]] = []
    skipped: dict[str, list[int]] = {}
    number = 0
    for number, line in files.read_lines(path, max_bytes=_MAX_LINE_BYTES):
        pair = _pair(line)
        if isinstance(pair, str):
            skipped.setdefault(pair, []).append(number)
        else:
            first, second = pair
            rows.append((second, first, number) if swap else (first, second, number))
    report = RowReport(source=path.name, n_rows=number, skipped=skipped)
    report.require_good()
    return SentencePairs(rows=rows, report=report)


def _pair(line: bytes | None) -> tuple[str, str] | str:
    """Return the two columns of a line, or the reason why it is skipped."""
    if line is None:
        return files.TOO_LONG
    try:
        columns = line.decode("utf-8").split("\t", 2)
    except UnicodeDecodeError:
        return files.NOT_UTF8
    if len(columns) < 2:
        return files.NO_TAB
    first, second = columns[0].strip(), columns[1].strip()
    return (first, second) if first and second else files.EMPTY_SIDE


def encode_sources(tokenizer: Tokenizer, texts: Sequence[str]) -> Ragged:
    """Return the encoder input: the tokens of each text and <eos>.

    Args:
        tokenizer: The tokenizer.
        texts: The source texts.
    """
    return Ragged.of([[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)])


def encode_targets(tokenizer: Tokenizer, texts: Sequence[str]) -> Ragged:
    """Return <bos>, the tokens and <eos> of each text: decoder input without the last id, labels without the first.

    Args:
        tokenizer: The tokenizer.
        texts: The target texts.
    """
    return Ragged.of([[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)])


class PairSplit(Split[PairBatch | PackedPairBatch]):
    """Encoded pairs. `sources` and `targets` are the texts of the rows; `report` counts the skipped rows."""

    packable = True
    device_attrs = ("_source", "_target")

    def __init__(self, pairs: SentencePairs, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        source = encode_sources(tokenizer, pairs.sources)
        target = encode_targets(tokenizer, pairs.targets)
        fits = (source.lengths <= max_tokens) & (target.lengths - 1 <= max_tokens)
        if not fits.any():
            reason = f"all {len(pairs):,} pairs have a side of more than {max_tokens} tokens"
            raise DataError(f"{pairs.report.source}: {reason}; increase max_tokens")
        self.report = pairs.report.with_skipped(files.TOO_LONG, pairs.select((~fits).tolist()).lines)
        fitting = pairs.select(fits.tolist())
        indices = fits.nonzero().flatten()
        self.sources = fitting.sources
        self.targets = fitting.targets
        self._source = source.select(indices)
        self._target = target.select(indices)
        self._pad_id = tokenizer.pad_id

    def __len__(self) -> int:
        return len(self.sources)

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        return torch.stack([self._source.lengths, self._target.lengths - 1], dim=1)

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> PairBatch:
        source, source_lengths = self._source.padded(rows, fill=self._pad_id, multiple=multiple)
        target, target_lengths = self._target.padded(rows, fill=self._pad_id, drop=1, multiple=multiple)
        labels, _ = self._target.padded(rows, fill=self._pad_id, skip=1, multiple=multiple)
        on_device = target_lengths.to(labels.device)
        n_labels = int(target_lengths.sum())
        return PairBatch(
            source=source,
            source_lengths=source_lengths.to(source.device),
            target=target,
            target_lengths=on_device,
            labels=labels,
            weights=length_mask(on_device, labels.shape[1]).to(torch.float32),
            n_tokens=int(source_lengths.sum()) + n_labels,
            n_padded=source.numel() + target.numel(),
            n_labels=n_labels,
        )

    def packed(self, rows: Int[Tensor, "R most"], width: int, *, epoch: int = 0) -> PackedPairBatch:
        source = self._source.layout(rows, width)
        target = self._target.layout(rows, width, drop=1)
        pairs = rows[rows >= 0]
        n_labels = int((self._target.lengths[pairs] - 1).sum())
        return PackedPairBatch(
            source=self._source.packed(rows, source, fill=self._pad_id),
            source_documents=source.documents,
            source_positions=source.positions,
            target=self._target.packed(rows, target, fill=self._pad_id),
            target_documents=target.documents,
            target_positions=target.positions,
            labels=self._target.packed(rows, target, fill=self._pad_id, skip=1),
            weights=target.real.to(torch.float32),
            n_tokens=int(self._source.lengths[pairs].sum()) + n_labels,
            n_padded=2 * rows.shape[0] * width,
            n_labels=n_labels,
        )


class TranslationTask:
    """The task of translating the first side of sentence pairs into the second."""

    name = "translation"

    def __init__(self, train: PairSplit, validation: PairSplit, tokenizer: Tokenizer) -> None:
        self.train = train
        self.validation = validation
        self.tokenizer = tokenizer

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        validation: Path | str | None = None,
        tokenizer: Tokenizer | None = None,
        vocab_size: int = 8000,
        max_tokens: int = 128,
        hold_out: float = 0.02,
        swap: bool = False,
        phrases: Sequence[tuple[str, str]] = (),
    ) -> TranslationTask:
        """Load a file of pairs, or a folder with `train.tsv` and optionally `dev.tsv` (also `.xz` or `.gz`).

        Args:
            path: The file or folder.
            validation: Validation file; by default that of the folder, or a held-out part.
            tokenizer: Tokenizer of both sides; by default a BPE is trained on the training pairs.
            vocab_size: Vocabulary size of the trained BPE.
            max_tokens: Pairs with a longer side are skipped.
            hold_out: Fraction of the source sentences for validation if there is no validation file.
            swap: Translate the second column into the first.
            phrases: Additional training pairs.

        Raises:
            DataError: A part has no valid pair.
            StorageError: A file cannot be read.
        """
        train_path, default_validation = find_files(Path(path))
        validation_path = Path(validation) if validation is not None else default_validation
        pairs = read_pairs(train_path, swap=swap)
        if validation_path is not None:
            held_out = read_pairs(validation_path, swap=swap)
        else:
            pairs, held_out = divide(pairs, hold_out)
        pairs = replace(pairs, rows=[*pairs.rows, *((source, target, 0) for source, target in phrases)])
        if tokenizer is None:
            tokenizer = train_bpe([*pairs.sources, *pairs.targets], vocab_size)
        train_split, validation_split = (
            PairSplit(part, tokenizer, max_tokens=max_tokens) for part in (pairs, held_out)
        )
        return cls(train_split, validation_split, tokenizer)


def divide(pairs: SentencePairs, fraction: float) -> tuple[SentencePairs, SentencePairs]:
    """Split pairs into training and validation pairs, depending on the hash of the source sentence only."""
    fraction = validate(fraction, "hold_out", OpenUnit)
    is_held_out = [zlib.crc32(source.encode()) < fraction * 2**32 for source in pairs.sources]
    if all(is_held_out) or not any(is_held_out):
        raise DataError(
            f"{pairs.report.source}: holding out {fraction:.1%} of {len(pairs):,} pairs leaves one part empty; "
            "give a validation file or another hold_out"
        )
    return pairs.select([not flag for flag in is_held_out]), pairs.select(is_held_out)


def find_files(path: Path) -> tuple[Path, Path | None]:
    """Return the training file of a path and its validation file, if any."""
    if not path.is_dir():
        return path, None

    def first(names: Sequence[str]) -> Path | None:
        candidates = [path / f"{name}{ending}" for name in names for ending in ("", ".xz", ".gz")]
        return next((candidate for candidate in candidates if candidate.is_file()), None)

    train = first(_TRAIN_NAMES)
    if train is None:
        raise StorageError(f"{path} has no file of pairs: expected one of {', '.join(_TRAIN_NAMES)} (or .xz, .gz)")
    return train, first(_VALIDATION_NAMES)
