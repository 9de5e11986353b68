"""Results of generation: `Generated` is the complete result, `GenerationStep` one step of a stream.

Axes:
    B prompts   N sequences per prompt, best first   T new ids of the longest sequence
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from clearhead._core.shapes import Bool, Float, Int


@dataclass(frozen=True, eq=False)
class GenerationStep:
    """One step of a stream: the newest id of every prompt.

    Attributes:
        ids: The new ids; the pad id for rows that had already finished.
        log_probs: Log-probabilities under the model, before any temperature or filter.
        is_active: True for rows that had not finished before this step.
    """

    ids: Int[Tensor, " B"]
    log_probs: Float[Tensor, " B"]
    is_active: Bool[Tensor, " B"]


@dataclass(frozen=True, eq=False)
class Generated:
    """The new ids (without the prompts), as padded tensors on the model's device.

    N is 1 for `Greedy` and `Sample`, and `n_best` for `BeamSearch`. Sequences are padded with the stop id (0 if there
    is no stop id) and log-probability 0. If a prompt has fewer than N possible sequences, the missing ones have length
    0 and score −∞.

    Attributes:
        ids: New ids.
        lengths: Number of new ids, including a stop id.
        log_probs: Log-probability of each id under the model, before any temperature or filter.
        scores: Σ log_probs, for `BeamSearch` divided by length**length_penalty.
        finished: True if the sequence ended with a stop id, False if `max_new_tokens` was reached.
    """

    ids: Int[Tensor, "B N T"]
    lengths: Int[Tensor, "B N"]
    log_probs: Float[Tensor, "B N T"]
    scores: Float[Tensor, "B N"]
    finished: Bool[Tensor, "B N"]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def sequence(self, row: int = 0, rank: int = 0, *, with_stop: bool = False) -> Int[Tensor, " n"]:
        """Return the new ids of one sequence.

        Args:
            row: Index of the prompt.
            rank: Index among the sequences of this prompt, best first.
            with_stop: Include the stop id.
        """
        drops_stop = not with_stop and bool(self.finished[row, rank])
        return self.ids[row, rank, : int(self.lengths[row, rank]) - drops_stop]

    @property
    def best(self) -> list[Tensor]:
        """The best sequence per prompt, 1-D, without its stop id."""
        return [self.sequence(row) for row in range(len(self))]

    def to(self, device: torch.device | str) -> Generated:
        """Return a copy on another device."""
        return Generated(*(getattr(self, field.name).to(device) for field in fields(self)))

    def __repr__(self) -> str:
        B, N, T = self.ids.shape
        n_finished = int(self.finished.sum())
        return f"Generated({B} prompts × {N} sequences, up to {T} ids each, {n_finished} ended with a stop id)"
