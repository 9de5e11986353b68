"""Plain text: predict each token from those before it, in windows of a fixed width, for a decoder.

The last part of the text (a tenth, unless told) is the validation part. There the windows stand end to end
and every token but the first is predicted exactly once, so a validation loss is over the whole part and does
not depend on luck.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from clearhead._shapes import Int
from clearhead.config import Value
from clearhead.data import draws, files, report
from clearhead.data.batch import TokenBatch
from clearhead.data.ragged import inside
from clearhead.data.report import Report, Tally
from clearhead.data.task import Split
from clearhead.data.tokenizers import Characters, Tokenizer
from clearhead.errors import DataError
from clearhead.values import Fraction, checked, whole

_STARTS, _PHASE = 211, 223


@dataclass(frozen=True)
class RandomWindows:
    """Windows that start anywhere, anew in each epoch; an epoch has as many as would cover the text once."""

    def count(self, n_ids: int, context: int) -> int:
        return -(-(n_ids - 1) // context)

    def starts(self, rows: Int[Tensor, " B"], n_ids: int, context: int, *, seed: int, epoch: int) -> Int[Tensor, " B"]:
        return draws.below(max(1, n_ids - context), _STARTS, seed, epoch, rows)


@dataclass(frozen=True)
class ConsecutiveWindows(Value):
    """Windows end to end over the whole text, the last one shorter.

    `shifted` begins each epoch at another token, so that the cuts fall elsewhere: then all windows are full, and less
    than two windows' worth is left out at the ends.
    """

    shifted: bool = False

    def count(self, n_ids: int, context: int) -> int:
        if not self.shifted:
            return -(-(n_ids - 1) // context)
        return max(1, (n_ids - 1) // context - 1)

    def starts(self, rows: Int[Tensor, " B"], n_ids: int, context: int, *, seed: int, epoch: int) -> Int[Tensor, " B"]:
        if not self.shifted:
            return rows * context
        room = max(0, n_ids - 1 - self.count(n_ids, context) * context)
        return rows * context + draws.below(room + 1, _PHASE, seed, epoch)


Windows: TypeAlias = RandomWindows | ConsecutiveWindows


def read_text(path: Path | str) -> tuple[str, Report]:
    """A text file with line ends as LF. Lines that are not UTF-8 are skipped and reported."""
    path = Path(path)
    with files.open_bytes(path) as file:
        content = file.read().removeprefix(files.BOM)
    tally = Tally(path.name)
    kept: list[str] = []
    lines = content.replace(b"\r\n", b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            kept.append(line.decode("utf-8"))
        except UnicodeDecodeError:
            tally.skip(report.NOT_UTF8, number)
        else:
            if line or number < len(lines):  # after the last line end there is no further line
                tally.good()
    result = tally.report()
    result.require_good()
    return "\n".join(kept), result


class WindowSplit(Split[TokenBatch]):
    """Windows of `context` tokens over one long row of ids, each label the token after."""

    def __init__(
        self,
        ids: Int[Tensor, " N"],
        *,
        context: int,
        windows: Windows,
        seed: int = 0,
        pad_id: int = 0,
    ) -> None:
        if len(ids) < 2:
            raise DataError(f"a text of {len(ids)} tokens has nothing to predict: expected at least 2")
        self.ids = ids
        self.context = whole(context, "context", least=1)
        self.windows = windows
        self.seed = seed
        self._pad_id = pad_id

    def __len__(self) -> int:
        return self.windows.count(len(self.ids), self.context)

    def _bounds(self, rows: Int[Tensor, " B"], epoch: int) -> tuple[Tensor, Tensor]:
        """First input of each window and the one after its last."""
        start = self.windows.starts(rows, len(self.ids), self.context, seed=self.seed, epoch=epoch)
        return start, (start + self.context).clamp(max=len(self.ids) - 1)

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        start, end = self._bounds(torch.arange(len(self)), epoch)
        return (end - start)[:, None]

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> TokenBatch:
        device = self.ids.device
        start, end = self._bounds(rows, epoch)
        lengths = end - start
        # Always the whole context wide, so that every batch has the same shape.
        width = -(-self.context // multiple) * multiple
        real = inside(lengths.to(device), width)
        index = start.to(device)[:, None] + torch.arange(width, device=device)  # (B, T)
        last = len(self.ids) - 1
        ids = self.ids[index.clamp(max=last)].to(torch.int64).masked_fill(~real, self._pad_id)
        labels = self.ids[(index + 1).clamp(max=last)].to(torch.int64).masked_fill(~real, self._pad_id)
        n = int(lengths.sum())
        return TokenBatch(
            ids=ids,
            lengths=lengths.to(device),
            labels=labels,
            weights=real.to(torch.float32),
            n_tokens=n,
            n_padded=ids.numel(),
            n_labels=n,
        )

    def to(self, device: torch.device | str) -> WindowSplit:
        moved = copy.copy(self)
        moved.ids = self.ids.to(device)
        return moved


class Text:
    """The task: continue a text."""

    name = "text"

    def __init__(self, train: WindowSplit, validation: WindowSplit, tokenizer: Tokenizer, report: Report) -> None:
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
        windows: Windows | None = None,
        hold_out: float = 0.1,
        seed: int = 0,
    ) -> Text:
        """From a text file (or a folder with `input.txt`), the last `hold_out` of it for validation.

        Without a tokenizer, the characters of the text are one. `seed` decides where training's windows start.
        """
        path = Path(path)
        text, rows = read_text(path / "input.txt" if path.is_dir() else path)
        hold_out = checked(hold_out, "hold_out", Fraction)
        cut = int(len(text) * (1 - hold_out))
        if tokenizer is None:
            tokenizer = Characters.of(text)

        def split(part: str, how: Windows) -> WindowSplit:
            ids = tokenizer.encode_long(part)
            return WindowSplit(ids, context=context, windows=how, seed=seed, pad_id=tokenizer.pad_id)

        train = split(text[:cut], windows or RandomWindows())
        return cls(train, split(text[cut:], ConsecutiveWindows()), tokenizer, rows)
