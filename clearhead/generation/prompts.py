"""Validate prompts and convert them to rows of ids.

B prompts   T ids of the longest prompt
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead._core.validation import short_repr
from clearhead.errors import DtypeError, ShapeError
from clearhead.masks import Mask, padding

UNBOUNDED_LENGTH = 2**31 - 1  # no sequence is this long, so padding(…) of this length hides left padding only

# One prompt (1-D), prompts of one length (a (B, T) tensor), or prompts of any lengths (a list of 1-D tensors or lists).
Prompt = Tensor | Sequence[Tensor] | Sequence[Sequence[int]] | Sequence[int]


def prompt_rows(prompt: Prompt, vocab_size: int) -> list[Tensor]:
    """Return the prompts as non-empty 1-D int64 tensors on the CPU; raise if an id is outside the vocabulary.

    Rows are padded on the CPU and copied to the model's device at once."""
    if isinstance(prompt, Tensor):
        prompt = prompt.cpu()
    rows = [_row(row, index) for index, row in enumerate(_split(prompt))]
    if not rows:
        raise ShapeError("got no prompts; expected at least one row of ids")
    if empty := [index for index, row in enumerate(rows) if not len(row)]:
        raise ShapeError(
            f"prompt {empty[0]} is empty; expected at least one id to continue, such as a start-of-text id"
        )
    low, high = (int(bound) for bound in torch.aminmax(torch.cat(rows)))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        index = next(i for i, row in enumerate(rows) if bool((row == wrong).any()))
        raise ShapeError(
            f"prompt {index} contains the id {wrong}, but the model's vocabulary is 0 … {vocab_size - 1}; "
            "use the tokenizer that the model was trained with"
        )
    return rows


def pad_rows(rows: Sequence[Tensor], *, left: bool = False, fill: int = 0) -> Tensor:
    """Stack rows of ids or frames into (B, T, …), padded on the right, or on the left if `left`."""
    side = "left" if left else "right"
    return pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side=side)


def left_padding_kwargs(left_pad: Tensor, first: int, T: int, *, adds_positions: bool) -> dict[str, Mask | Tensor]:
    """Return the mask and positions to pass to a model for T ids from index `first`, with `left_pad` (B,) pad ids.

    The mask hides the padding, and positions, if the model adds them, do not count it."""
    kwargs: dict[str, Mask | Tensor] = {"mask": padding(torch.full_like(left_pad, UNBOUNDED_LENGTH), left_pad=left_pad)}
    if adds_positions:
        index = torch.arange(first, first + T, device=left_pad.device)
        kwargs["positions"] = (index - left_pad[:, None]).clamp(min=0)  # (B, T); those of padding are masked
    return kwargs


def frame_rows(prompt: object, n_features: int) -> list[Tensor]:
    """Return the audio frames (T, F) of each recording of a batch; raise `ShapeError` for other shapes."""
    if not isinstance(prompt, Tensor) or prompt.dim() != 3 or 0 in prompt.shape or prompt.shape[2] != n_features:
        got = f"shape {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else f"a {type(prompt).__name__}"
        raise ShapeError(f"the prompt is {got}; expected audio frames (batch, frames, {n_features}) from `Mel`")
    return list(prompt)


def _split(prompt: object) -> list[object]:
    """Return the rows of a prompt; a flat row of ids is a batch of one."""
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


def _row(row: object, index: int) -> Tensor:
    """Return one prompt as an int64 tensor on the CPU."""
    if not isinstance(row, Tensor):
        if isinstance(row, (str, bytes)) or not isinstance(row, Sequence):
            raise DtypeError(
                f"prompt {index} is {short_repr(row)}; expected a row of ids (a tokenizer turns text into ids)"
            )
        if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in row):
            raise DtypeError(f"prompt {index} is {short_repr(list(row))}; expected token ids, whole numbers")
        try:
            row = torch.tensor(row, dtype=torch.int64)
        except (OverflowError, RuntimeError, ValueError) as error:
            largest = short_repr(max(row, key=abs))
            raise ShapeError(f"prompt {index} contains {largest}; expected token ids, which are below 2⁶³") from error
    if row.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"prompt {index} is {row.dtype}; expected token ids, torch.int64 (or int32)")
    if row.dim() != 1:
        raise ShapeError(f"prompt {index} has shape {tuple(row.shape)}; expected one row of ids, (length,)")
    ids: Tensor = row.long().cpu()
    return ids
