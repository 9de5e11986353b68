"""The interface between a search and a model, and decoders composed of other decoders.

`IncrementalDecoder` has three methods and hides attention, caches and text. `model_decoders.py` implements it for the
models of this package. To search any other source of next-token logits, pass an object with these methods to `search`,
or wrap a function from ids to logits in `UncachedDecoder`. `ContinuousDecoder` adds the methods by which a search fills
free rows with further prompts, and lets the decoder capture its steps as CUDA graphs.

    B prompts   R active rows (prompts times beams, without finished ones)   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from clearhead._core.shapes import Float, Int
from clearhead.errors import ClearheadError

State = TypeVar("State")


class LogitsError(ClearheadError, ArithmeticError):
    """Logits that no id can be chosen from: NaN, +∞, or −∞ everywhere."""


@runtime_checkable
class IncrementalDecoder(Protocol):
    """Produces next-token logits for a batch of growing sequences.

    Logits need not be normalized; −∞ forbids an id.
    """

    def prefill(self) -> Tensor:
        """Process the prompts and return the logits of the next id, shape (B, V). Called once, first."""
        ...

    def decode_step(self, ids: Tensor) -> Tensor:
        """Append one id per row, shape (R,), and return the next logits, shape (R, V)."""
        ...

    def reorder_cache(self, rows: Tensor) -> None:
        """Replace row i by a copy of row `rows[i]`. Rows may be repeated or dropped."""
        ...


@runtime_checkable
class ContinuousDecoder(IncrementalDecoder, Protocol):
    """An `IncrementalDecoder` whose rows are filled one by one, and whose steps can be captured as CUDA graphs.

    Attributes:
        n_prompts: Number of prompts.
        max_rows: Largest number of rows of a batch.
        is_static: Whether steps have fixed shapes and no host syncs. Then the state of a search must be adopted, and
            `select_rows` and `reorder_beams` replace `reorder_cache`.
    """

    n_prompts: int
    is_static: bool

    @property
    def max_rows(self) -> int: ...

    def reserve_rows(self) -> tuple[int, int]:
        """Allocate the cache, and return how many prompts are decoded at once, and the number of slots.

        With static shapes, the state of a search has the number of slots as its number of rows.
        """
        ...

    def subset(self, prompts: range) -> ContinuousDecoder:
        """Return a decoder for some of the prompts."""
        ...

    def prefill_rows(self, prompts: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Process prompts in rows that are free, and return the logits of their next ids, shape (P, V)."""
        ...

    def release(self) -> None:
        """End the request."""
        ...

    # Only with static shapes:

    def select_rows(self, rows: Tensor) -> None:
        """Continue with these rows, which are different."""
        ...

    def prefill_beams(self, width: int) -> Tensor:
        """Process all prompts, and reserve `width` adjacent rows for each. Return the logits, shape (B, V)."""
        ...

    def start_beams(self, width: int) -> None:
        """Let the `width` rows of each prompt continue it."""
        ...

    def reorder_beams(self, rows: Tensor) -> None:
        """Replace row i by a copy of row `rows[i]` of the same prompt, without a host sync."""
        ...

    def adopt(self, key: Hashable, state: State) -> State:
        """Return the state in memory that captured graphs use, with the values of `state`."""
        ...

    def replay(self, key: Hashable, run: Callable[[], None]) -> None:
        """Call a function that uses an adopted state and the decoder only, through a CUDA graph if possible."""
        ...


def state_tensors(state: Any) -> list[Tensor]:
    """Return all tensors of nested tuples."""
    if isinstance(state, Tensor):
        return [state]
    return [tensor for part in state for tensor in state_tensors(part)]


def size_bucket(n: int) -> int:
    """Round `n` up to a power of two or 1.5 times one, so that few sizes are allocated."""
    power = 1 << max(0, n - 1).bit_length()
    return 3 * power // 4 if power >= 16 and n <= 3 * power // 4 else power


def batch_bucket(n: int) -> int:
    """Round a number of rows up to one that graphs are captured for: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, and so on."""
    return n if n <= 2 else size_bucket(n) if n > 16 or n <= 8 else 16


class UncachedDecoder:
    """An `IncrementalDecoder` that calls a function with all ids at every step.

    Args:
        logits: Maps all ids so far, shape (R, n), to the logits of the next id, shape (R, V).
        prompts: Prompts of one length, shape (B, n).
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], prompts: Int[Tensor, "B n"]) -> None:
        self._logits = logits
        self._ids = prompts

    def prefill(self) -> Float[Tensor, "B V"]:
        """Return the logits (B, V) after the prompts."""
        return self._logits(self._ids)

    def decode_step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Append one id (R,) per row and return the next logits (R, V)."""
        self._ids = torch.cat((self._ids, ids[:, None]), dim=1)
        return self._logits(self._ids)

    def reorder_cache(self, rows: Int[Tensor, " rows"]) -> None:
        """Replace row i by a copy of row `rows[i]`."""
        self._ids = self._ids.index_select(0, rows)


class LengthBucketedDecoder:
    """Runs several decoders as one, for prompts that cannot share a padded batch.

    `members[g]` are the indices, among all prompts, of the rows of decoder g, in increasing order. The relative order
    of the rows of one decoder never changes.
    """

    def __init__(self, decoders: Sequence[IncrementalDecoder], members: Sequence[Sequence[int]]) -> None:
        self._decoders = list(decoders)
        self._sizes = [len(bucket) for bucket in members]
        # Index of each row in the concatenation of all decoders' rows.
        self._index = torch.tensor([row for bucket in members for row in bucket]).argsort()

    def prefill(self) -> Float[Tensor, "B V"]:
        return self._merge([decoder.prefill() for decoder in self._decoders])

    def decode_step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        parts = torch.empty_like(ids).index_copy_(0, self._index.to(ids.device), ids).split(self._sizes)
        return self._merge([decoder.decode_step(part) for decoder, part in zip(self._decoders, parts, strict=True)])

    def reorder_cache(self, rows: Int[Tensor, " rows"]) -> None:
        index = self._index[rows.cpu()]
        ends = torch.tensor(self._sizes).cumsum(0)
        bucket = torch.bucketize(index, ends, right=True)
        local_rows = [
            index[bucket == g] - (end - size) for g, (end, size) in enumerate(zip(ends, self._sizes, strict=True))
        ]
        remaining = [(decoder, local) for decoder, local in zip(self._decoders, local_rows, strict=True) if len(local)]
        for decoder, local in remaining:
            decoder.reorder_cache(local)
        self._decoders = [decoder for decoder, _ in remaining]
        self._sizes = [len(local) for _, local in remaining]
        self._index = bucket.argsort(stable=True).argsort()

    def _merge(self, parts: list[Tensor]) -> Tensor:
        """Return the logits of all decoders, row by row in the order of the search."""
        return torch.cat(parts).index_select(0, self._index.to(parts[0].device))


class SlidingContextDecoder:
    """Continues past a table of learned positions by dropping the oldest ids.

    While everything fits into `max_positions`, one decoder is used. After that every id moves one position to the left
    at each step, which invalidates the cache, so the last `max_positions` ids are encoded again at each step.

    Args:
        rows: Prompts.
        max_positions: Number of rows of the position table.
        make_decoder: Returns a decoder for some rows that supports n further ids.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        max_positions: int,
        make_decoder: Callable[[Sequence[Tensor], int], IncrementalDecoder],
    ) -> None:
        self._rows = [row[-max_positions:] for row in rows]
        self._max_positions = max_positions
        self._make_decoder = make_decoder
        self._steps_before_sliding = max_positions + 1 - max(len(row) for row in self._rows)
        self._cached: IncrementalDecoder | None = make_decoder(self._rows, self._steps_before_sliding)

    def prefill(self) -> Float[Tensor, "B V"]:
        assert self._cached is not None
        self._steps_before_sliding -= 1
        return self._cached.prefill()

    def decode_step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        newest = ids.cpu().split(1)
        self._rows = [torch.cat(pair)[-self._max_positions :] for pair in zip(self._rows, newest, strict=True)]
        if self._cached is not None and self._steps_before_sliding > 0:
            self._steps_before_sliding -= 1
            return self._cached.decode_step(ids)
        self._cached = None  # frees its memory
        return self._make_decoder(self._rows, 1).prefill()

    def reorder_cache(self, rows: Int[Tensor, " rows"]) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]
        if self._cached is not None:
            self._cached.reorder_cache(rows)
