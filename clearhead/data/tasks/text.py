"""Language modeling: predict each token of a plain text from the previous ones, in windows of fixed width.

The last part of the text (by default a tenth) is for validation. There the windows are consecutive, and every token
except the first is predicted exactly once, so the validation loss covers the whole part and is not random."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from clearhead._core import counter_rng
from clearhead._core.shapes import Int
from clearhead._core.validation import OpenUnit, check_int, require, validate
from clearhead.config import Validated
from clearhead.data import files
from clearhead.data.batch import Split, TokenBatch
from clearhead.data.files import RowReport
from clearhead.data.packing import length_mask, round_up
from clearhead.data.shards import Shards, is_shards
from clearhead.data.tokenizers.base import CharTokenizer, Tokenizer
from clearhead.data.tokenizers.library import train_bpe
from clearhead.errors import DataError

_STARTS, _PHASE = 211, 223
_MAX_RANDOM_IDS = 1 << 31  # limit of `counter_rng.randint`


@dataclass(frozen=True)
class RandomWindows:
    """Windows with random starts, new in each epoch; an epoch has as many windows as would cover the text once."""

    def count(self, n_ids: int, context: int) -> int:
        """Return the number of windows per epoch."""
        return -(-(n_ids - 1) // context)

    def starts(self, rows: Int[Tensor, " B"], n_ids: int, context: int, *, seed: int, epoch: int) -> Int[Tensor, " B"]:
        """Return random starts for the windows of these rows."""
        limit = f"RandomWindows supports at most {_MAX_RANDOM_IDS:,} tokens, got {n_ids:,}"
        require(n_ids <= _MAX_RANDOM_IDS, f"{limit}; use ConsecutiveWindows(shifted=True)")
        return counter_rng.randint(max(1, n_ids - context), _STARTS, seed, epoch, rows)


@dataclass(frozen=True)
class ConsecutiveWindows(Validated):
    """Consecutive windows over the whole text; the last one is shorter.

    With `shifted` each epoch starts at another token, so the boundaries differ. Then all windows are full, and less
    than two windows are dropped at the ends.

    Args:
        shifted: Whether each epoch starts at another token.
    """

    shifted: bool = False

    def count(self, n_ids: int, context: int) -> int:
        """Return the number of windows per epoch."""
        return max(1, (n_ids - 1) // context - 1) if self.shifted else -(-(n_ids - 1) // context)

    def starts(self, rows: Int[Tensor, " B"], n_ids: int, context: int, *, seed: int, epoch: int) -> Int[Tensor, " B"]:
        """Return consecutive starts for the windows of these rows."""
        if not self.shifted:
            return rows * context
        max_shift = max(0, n_ids - 1 - self.count(n_ids, context) * context)
        return rows * context + counter_rng.randint(max_shift + 1, _PHASE, seed, epoch)


Windows: TypeAlias = RandomWindows | ConsecutiveWindows


def read_text(path: Path | str) -> tuple[str, RowReport]:
    """Read a text file with line ends as LF; lines that are not UTF-8 are skipped and reported.

    Args:
        path: The file.

    Returns:
        The text, and a report of the skipped lines.
    """
    path = Path(path)
    with files.open_bytes(path) as file:
        text, n_lines, bad = files.decode_lines(file.read().removeprefix(files.BOM).replace(b"\r\n", b"\n"))
    report = RowReport(source=path.name, n_rows=n_lines).with_skipped(files.NOT_UTF8, bad)
    report.require_good()
    return text, report


class _Windows(Split[TokenBatch]):
    """Windows of `context` tokens over a sequence of `n_ids` ids; the label of a token is the next one."""

    _separator_id: int | None = None  # end-of-document id if tokens attend only to their own document

    def __init__(self, n_ids: int, *, context: int, windows: Windows, seed: int, pad_id: int) -> None:
        if n_ids < 2:
            raise DataError(f"a text of {n_ids} tokens has nothing to predict; expected at least 2 tokens")
        self.n_ids = n_ids
        self.context = check_int(context, "context", minimum=1)
        self.windows = windows
        self.seed = seed
        self._pad_id = pad_id

    def __len__(self) -> int:
        return self.windows.count(self.n_ids, self.context)

    def _bounds(self, rows: Int[Tensor, " B"], epoch: int) -> tuple[Tensor, Tensor]:
        """Return the index of each window's first input, and of the token after its last one."""
        start = self.windows.starts(rows, self.n_ids, self.context, seed=self.seed, epoch=epoch)
        return start, (start + self.context).clamp(max=self.n_ids - 1)

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        start, end = self._bounds(torch.arange(len(self)), epoch)
        return (end - start)[:, None]

    @abstractmethod
    def _tokens(self, start: Tensor, end: Tensor, width: int) -> Int[Tensor, "B width"]:
        """Return the tokens of each window up to and including `end`; the columns after it are undefined."""

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> TokenBatch:
        start, end = self._bounds(rows, epoch)
        # Always the full context width, so that all batches have the same shape.
        width = round_up(self.context, multiple)
        tokens = self._tokens(start, end, width + 1)
        lengths = (end - start).to(tokens.device)
        real = has_label = length_mask(lengths, width)
        ids = tokens[:, :-1].masked_fill(~real, self._pad_id)
        n_labels = n_tokens = int((end - start).sum())
        documents = None
        if self._separator_id is not None:
            is_end = ids == self._separator_id
            documents = is_end.cumsum(1) - is_end.long()  # the separator belongs to the document that it ends
            has_label = real & ~is_end
            n_labels = int(has_label.sum())
        return TokenBatch(
            ids=ids,
            lengths=lengths,
            labels=tokens[:, 1:].masked_fill(~real, self._pad_id),
            weights=has_label.to(torch.float32),
            documents=documents,
            n_tokens=n_tokens,
            n_padded=ids.numel(),
            n_labels=n_labels,
        )


class WindowSplit(_Windows):
    """Windows over ids in memory.

    Args:
        ids: All ids.
        context: Tokens per window.
        windows: How windows are chosen.
        seed: Seed of random windows.
        pad_id: Id of padding in shorter windows.
    """

    device_attrs = ("ids",)

    def __init__(
        self, ids: Int[Tensor, " N"], *, context: int, windows: Windows, seed: int = 0, pad_id: int = 0
    ) -> None:
        super().__init__(len(ids), context=context, windows=windows, seed=seed, pad_id=pad_id)
        self.ids = ids

    def _tokens(self, start: Tensor, end: Tensor, width: int) -> Int[Tensor, "B width"]:
        index = start.to(self.ids.device)[:, None] + torch.arange(width, device=self.ids.device)
        return self.ids[index.clamp(max=len(self.ids) - 1)].to(torch.int64)


class ShardSplit(_Windows):
    """Windows over the ids `first` … `last` of shards, which stay in their files.

    With `separate_documents` tokens attend only to their own document, and the first token of a document is not
    predicted from the previous document.

    Args:
        shards: The shards.
        first: First id.
        last: End of the ids.
        context: Tokens per window.
        windows: How windows are chosen.
        separate_documents: Whether tokens attend only to their own document.
        seed: Seed of random windows.
    """

    is_streaming = True

    def __init__(
        self,
        shards: Shards,
        first: int,
        last: int,
        *,
        context: int,
        windows: Windows,
        separate_documents: bool,
        seed: int = 0,
    ) -> None:
        self.shards = shards
        self.first = first
        self.separate_documents = separate_documents
        tokenizer = shards.tokenizer
        self._separator_id = tokenizer.eos_id if separate_documents else None
        super().__init__(last - first, context=context, windows=windows, seed=seed, pad_id=tokenizer.pad_id)

    def _tokens(self, start: Tensor, end: Tensor, width: int) -> Int[Tensor, "B width"]:
        table = torch.full((len(start), width), self._pad_id)
        for row, first, last in zip(table, start.tolist(), end.tolist(), strict=True):
            row[: last - first + 1] = torch.from_numpy(self.shards.read(self.first + first, self.first + last + 1))
        return table


class LanguageModeling:
    """The task of continuing a text."""

    name = "text"

    def __init__(self, train: _Windows, validation: _Windows, tokenizer: Tokenizer, report: RowReport) -> None:
        self.train = train
        self.validation = validation
        self.tokenizer = tokenizer
        self.report = report

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        context: int = 256,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        windows: Windows | None = None,
        hold_out: float = 0.1,
        across_documents: bool = False,
        seed: int = 0,
    ) -> LanguageModeling:
        """Load a text file, a folder with `input.txt`, or a folder of shards.

        Args:
            path: The file or folder.
            context: Tokens per window.
            tokenizer: Tokenizer of the text. By default a BPE is trained if `vocab_size` is set, else the characters of
                the text are the tokens. Shards have a tokenizer.
            vocab_size: Vocabulary size of the trained BPE.
            windows: Training windows; by default random, and for shards consecutive and shifted.
            hold_out: Fraction at the end of the text for validation.
            across_documents: Whether tokens of shards attend to previous documents.
            seed: Seed of the windows.

        Raises:
            DataError: The text is too short, or the shards have another tokenizer.
            StorageError: A file cannot be read.
        """
        path = Path(path)
        hold_out = validate(hold_out, "hold_out", OpenUnit)
        if path.is_dir() and is_shards(path):
            shards = Shards.open(path)
            if tokenizer is not None and tokenizer.to_json() != shards.tokenizer.to_json():
                raise DataError(
                    f"{path} was tokenized with another tokenizer; remove tokenizer, or tokenize the text again"
                )
            cut = int(len(shards) * (1 - hold_out))
            make_shards = partial(
                ShardSplit, shards, context=context, seed=seed, separate_documents=not across_documents
            )
            train_shards = make_shards(0, cut, windows=windows or ConsecutiveWindows(shifted=True))
            validation_shards = make_shards(cut, len(shards), windows=ConsecutiveWindows())
            rows = RowReport(source=str(path), n_rows=shards.n_documents)
            return cls(train_shards, validation_shards, shards.tokenizer, rows)
        reason = "a text file is one document, only shards contain several"
        require(not across_documents, f"across_documents has no effect: {reason}")
        text, rows = read_text(path / "input.txt" if path.is_dir() else path)
        cut = int(len(text) * (1 - hold_out))
        if tokenizer is None:
            tokenizer = CharTokenizer.of(text) if vocab_size is None else train_bpe([text[:cut]], vocab_size)
        make_windows = partial(WindowSplit, context=context, seed=seed, pad_id=tokenizer.pad_id)
        train = make_windows(tokenizer.encode_long(text[:cut]), windows=windows or RandomWindows())
        held_out = make_windows(tokenizer.encode_long(text[cut:]), windows=ConsecutiveWindows())
        return cls(train, held_out, tokenizer, rows)
