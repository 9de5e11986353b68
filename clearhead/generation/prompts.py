"""Prompts, as a caller has them, made into rows of ids that have been looked at.

B prompts   T ids of the longest"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead.errors import DtypeError, ShapeError
from clearhead.masks import padding

EVERYTHING_AFTER = 2**31 - 1  # a length that no sequence reaches: padding(…) then hides what comes before, and no more

# One prompt (1-D), prompts of one length (a (B, T) tensor), or prompts of any lengths (a list of 1-D tensors or lists).
Prompt = Tensor | Sequence[Tensor] | Sequence[Sequence[int]] | Sequence[int]


def rows_of(prompt: Prompt, vocab_size: int) -> list[Tensor]:
    """The prompts as 1-D int64 tensors on the CPU, none of them empty, every id inside the vocabulary.

    They are put side by side there, and go to the model's device in one piece."""
    if isinstance(prompt, Tensor):
        prompt = prompt.cpu()
    rows = [_row(row, place) for place, row in enumerate(_split(prompt))]
    if not rows:
        raise ShapeError("there are no prompts; expected at least one row of ids")
    if empty := [place for place, row in enumerate(rows) if not len(row)]:
        raise ShapeError(
            f"prompt {empty[0]} is empty; expected at least one id to go on from, such as a start-of-text id"
        )
    low, high = (int(end) for end in torch.aminmax(torch.cat(rows)))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        place = next(i for i, row in enumerate(rows) if bool((row == wrong).any()))
        raise ShapeError(
            f"prompt {place} holds the id {wrong}, but the model's vocabulary is 0 … {vocab_size - 1}; "
            "check that the tokenizer and the model belong together"
        )
    return rows


def padded(rows: Sequence[Tensor], *, left: bool = False, fill: int = 0) -> Tensor:
    """(B, T, …): the rows side by side, of ids or of frames, filled up on the left or on the right."""
    side = "left" if left else "right"
    return pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side=side)


def beside(before: Tensor, first: int, T: int, *, adds_positions: bool) -> dict[str, Any]:
    """How a model is given T ids from place `first` on with so much padding (B,) in front of each row: a mask hides it,
    and where the model adds positions, they leave it out of the count."""
    given: dict[str, Any] = {"mask": padding(torch.full_like(before, EVERYTHING_AFTER), left_pad=before)}
    if adds_positions:
        place = torch.arange(first, first + T, device=before.device)
        given["positions"] = (place - before[:, None]).clamp(min=0)  # (B, T); padding's are never seen
    return given


def frames_of(prompt: Any, n_features: int) -> list[Tensor]:
    """Recordings of one length, as a model hears them, each (T, F)."""
    if not isinstance(prompt, Tensor) or prompt.dim() != 3 or 0 in prompt.shape or prompt.shape[2] != n_features:
        got = f"shape {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else f"a {type(prompt).__name__}"
        raise ShapeError(f"the prompt is {got}; expected frames of sound (batch, frames, {n_features}), as `Mel` gives")
    return list(prompt)


def _split(prompt: Any) -> list[Any]:
    """The prompt's rows; one flat row is a batch of one."""
    if isinstance(prompt, Tensor):
        if prompt.dim() not in (1, 2):
            raise ShapeError(
                f"the prompt has shape {tuple(prompt.shape)}; expected ids (batch, length), or a list of rows"
            )
        return [prompt] if prompt.dim() == 1 else list(prompt)
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        raise DtypeError(
            f"the prompt is a {type(prompt).__name__}; expected ids: a (batch, length) tensor or a list of "
            "rows (a tokenizer turns text into ids)"
        )
    if prompt and all(isinstance(id_, int) for id_ in prompt):
        return [prompt]
    return list(prompt)


def _row(row: Any, place: int) -> Tensor:
    if not isinstance(row, Tensor):
        if isinstance(row, (str, bytes)) or not isinstance(row, Sequence):
            raise DtypeError(f"prompt {place} is {row!r}; expected a row of ids (a tokenizer turns text into ids)")
        if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in row):
            raise DtypeError(f"prompt {place} is {list(row)!r}; expected whole numbers, token ids")
        row = torch.tensor(row, dtype=torch.int64)
    if row.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"prompt {place} is {row.dtype}; expected token ids, torch.int64 (or int32)")
    if row.dim() != 1:
        raise ShapeError(f"prompt {place} has shape {tuple(row.shape)}; expected one row of ids, (length,)")
    return row.long().cpu()
