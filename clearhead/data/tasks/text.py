"""Plain text: predict each token from those before it, in windows of a fixed width, for a decoder.

The last part of the text (a tenth, unless told) is the validation part. There the windows stand end to end
and every token but the first is predicted exactly once, so a validation loss is over the whole part and does
not depend on luck."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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
_MOST_RANDOM = 1 << 31  # what `draws.below` can draw from


@dataclass(frozen=True)
class RandomWindows:
    """Windows that start anywhere, anew in each epoch; an epoch has as many as would cover the text once."""

    def count(self, n_ids: int, context: int) -> int:
        """How many windows an epoch has: as many as would cover the text once."""
        return -(-(n_ids - 1) // context)

    def starts(self, rows: Int[Tensor, " B"], n_ids: int, context: int, *, seed: int, epoch: int) -> Int[Tensor, " B"]:
        """Where the windows of these rows (B,) begin: drawn from the seed and the epoch."""
        most = f"windows that start anywhere need at most {_MOST_RANDOM:,} tokens, and these are {n_ids:,}"
        require(n_ids <= _MOST_RANDOM, f"{most}; use ConsecutiveWindows(shifted=True)")
        return counter_rng.randint(max(1, n_ids - context), _STARTS, seed, epoch, rows)


@dataclass(frozen=True)
class ConsecutiveWindows(Validated):
    """Windows end to end over the whole text, the last one shorter.

    `shifted` begins each epoch at another token, so that the cuts fall elsewhere: then all windows are full, and less
    than two windows' worth is left out at the ends."""

    shifted: bool = False

    def count(self, n_ids: int, context: int) -> int:
        """How many windows an epoch has: the text once, end to end."""
        return max(1, (n_ids - 1) // context - 1) if self.shifted else -(-(n_ids - 1) // context)

    def starts(self, rows: Int[Tensor, " B"], n_ids: int, context: int, *, seed: int, epoch: int) -> Int[Tensor, " B"]:
        """Where the windows of these rows (B,) begin: one after the other."""
        if not self.shifted:
            return rows * context
        room = max(0, n_ids - 1 - self.count(n_ids, context) * context)
        return rows * context + counter_rng.randint(room + 1, _PHASE, seed, epoch)


Windows: TypeAlias = RandomWindows | ConsecutiveWindows


def read_text(path: Path | str) -> tuple[str, RowReport]:
    """A text file with line ends as LF. Lines that are not UTF-8 are skipped and reported."""
    path = Path(path)
    with files.open_bytes(path) as file:
        text, n_lines, bad = files.decode_lines(file.read().removeprefix(files.BOM).replace(b"\r\n", b"\n"))
    report = RowReport(source=path.name, n_rows=n_lines).with_skipped(files.NOT_UTF8, bad)
    report.require_good()
    return text, report


class _Windows(Split[TokenBatch]):
    """Windows of `context` tokens over one long row of `n_ids`, each label the token after."""

    _ends_documents: int | None = None  # the id that does, where documents are kept apart

    def __init__(self, n_ids: int, *, context: int, windows: Windows, seed: int, pad_id: int) -> None:
        if n_ids < 2:
            raise DataError(f"a text of {n_ids} tokens has nothing to predict: expected at least 2")
        self.n_ids, self.context = n_ids, check_int(context, "context", minimum=1)
        self.windows, self.seed, self._pad_id = windows, seed, pad_id

    def __len__(self) -> int:
        return self.windows.count(self.n_ids, self.context)

    def _bounds(self, rows: Int[Tensor, " B"], epoch: int) -> tuple[Tensor, Tensor]:
        """First input of each window and the one after its last."""
        start = self.windows.starts(rows, self.n_ids, self.context, seed=self.seed, epoch=epoch)
        return start, (start + self.context).clamp(max=self.n_ids - 1)

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        start, end = self._bounds(torch.arange(len(self)), epoch)
        return (end - start)[:, None]

    @abstractmethod
    def _tokens(self, start: Tensor, end: Tensor, width: int) -> Int[Tensor, "B width"]:
        """The tokens from each start on, up to and with that at its end; anything beyond."""

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> TokenBatch:
        start, end = self._bounds(rows, epoch)
        # Always the whole context wide, so that every batch has the same shape.
        width = round_up(self.context, multiple)
        tokens = self._tokens(start, end, width + 1)
        lengths = (end - start).to(tokens.device)
        real = counts = length_mask(lengths, width)
        ids = tokens[:, :-1].masked_fill(~real, self._pad_id)
        n_labels = n_tokens = int((end - start).sum())
        documents = None
        if self._ends_documents is not None:
            is_end = ids == self._ends_documents
            documents = is_end.cumsum(1) - is_end.long()  # an end belongs to what it ends
            counts = real & ~is_end
            n_labels = int(counts.sum())
        return TokenBatch(
            ids=ids,
            lengths=lengths,
            labels=tokens[:, 1:].masked_fill(~real, self._pad_id),
            weights=counts.to(torch.float32),
            documents=documents,
            n_tokens=n_tokens,
            n_padded=ids.numel(),
            n_labels=n_labels,
        )


class WindowSplit(_Windows):
    """Windows over ids that are all there."""

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
    """Windows over ids that stay in their files, from number `first` up to `last`.

    Batches travel when they have been read. Where documents are kept `apart`, no token attends to another document, and
    the first token of one is not predicted from the end of the one before."""

    is_streaming = True

    def __init__(
        self, shards: Shards, first: int, last: int, *, context: int, windows: Windows, apart: bool, seed: int = 0
    ) -> None:
        self.shards, self.first, self.apart = shards, first, apart
        tokenizer = shards.tokenizer
        self._ends_documents = tokenizer.eos_id if apart else None
        super().__init__(last - first, context=context, windows=windows, seed=seed, pad_id=tokenizer.pad_id)

    def _tokens(self, start: Tensor, end: Tensor, width: int) -> Int[Tensor, "B width"]:
        table = torch.full((len(start), width), self._pad_id)
        for row, one, other in zip(table, start.tolist(), end.tolist(), strict=True):
            row[: other - one + 1] = torch.from_numpy(self.shards.read(self.first + one, self.first + other + 1))
        return table


class LanguageModeling:
    """The task: continue a text."""

    name = "text"

    def __init__(self, train: _Windows, validation: _Windows, tokenizer: Tokenizer, report: RowReport) -> None:
        self.train, self.validation = train, validation
        self.tokenizer, self.report = tokenizer, report

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
        """From a text file (or a folder with `input.txt`, or of shards), the last `hold_out` of it for validation.

        Without a tokenizer, byte pairs are trained for a vocabulary of `vocab_size`; without that, the characters of
        the text are the tokens. Shards have theirs. `across_documents` lets tokens attend to the documents before
        theirs. `seed` decides where training's windows start: unless told otherwise they start anywhere, and in shards
        they stand end to end, cut elsewhere in each epoch."""
        path = Path(path)
        how: dict[str, Any] = {"context": context, "seed": seed}
        hold_out = validate(hold_out, "hold_out", OpenUnit)
        if path.is_dir() and is_shards(path):
            shards = Shards.open(path)
            if tokenizer is not None and tokenizer.to_json() != shards.tokenizer.to_json():
                raise DataError(
                    f"{path} was tokenized with another tokenizer than the one given; tokenize it with that"
                )
            cut, how["apart"] = int(len(shards) * (1 - hold_out)), not across_documents
            read = ShardSplit(shards, 0, cut, windows=windows or ConsecutiveWindows(shifted=True), **how)
            kept = ShardSplit(shards, cut, len(shards), windows=ConsecutiveWindows(), **how)
            rows = RowReport(source=str(path), n_rows=shards.n_documents)
            return cls(read, kept, shards.tokenizer, rows)
        why = "a text file is one document, only shards hold many"
        require(not across_documents, f"across_documents has no effect: {why}")
        text, rows = read_text(path / "input.txt" if path.is_dir() else path)
        cut = int(len(text) * (1 - hold_out))
        if tokenizer is None:
            tokenizer = CharTokenizer.of(text) if vocab_size is None else train_bpe([text[:cut]], vocab_size)
        how["pad_id"] = tokenizer.pad_id
        train = WindowSplit(tokenizer.encode_long(text[:cut]), windows=windows or RandomWindows(), **how)
        held_out = WindowSplit(tokenizer.encode_long(text[cut:]), windows=ConsecutiveWindows(), **how)
        return cls(train, held_out, tokenizer, rows)
