"""What comes out: `Generated`, all of it at the end, and `Step`, one id a row while it is being made.

B prompts   N sequences for each prompt, best first   T new ids of the longest"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._shapes import Bool, Float, Int

__all__ = ["Generated", "Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a stream: the newest id of every prompt.

    `running` says for which rows it counts: those that had not ended before. The others hold a filler.
    `log_probs` are the model's own, before any temperature or filter."""

    ids: Int[Tensor, " B"]
    log_probs: Float[Tensor, " B"]
    running: Bool[Tensor, " B"]


@dataclass(frozen=True, eq=False)
class Generated:
    """The new ids (the prompt is not repeated), as padded tensors on the model's device.

    N is 1 for `Greedy` and `Sample` and `n_best` for `Beam`. Beyond its length a sequence is filled with the
    stop id (0 where there is none) and log-probabilities 0. Where a prompt has fewer than N possible
    sequences, the rest have length 0 and score −∞."""

    ids: Int[Tensor, "B N T"]
    lengths: Int[Tensor, "B N"]  # new ids, a stop id included
    log_probs: Float[Tensor, "B N T"]  # of each id, by the model itself: no temperature, no filter
    scores: Float[Tensor, "B N"]  # Σ log_probs, for Beam divided by length**length_penalty
    finished: Bool[Tensor, "B N"]  # True: ended with a stop id; False: max_new came first

    def __len__(self) -> int:
        return self.ids.shape[0]

    def sequence(self, row: int = 0, rank: int = 0, *, with_stop: bool = False) -> Int[Tensor, " n"]:
        """The new ids for prompt `row`: the best of them, or the one at `rank`; without its stop id unless asked."""
        length = int(self.lengths[row, rank])
        if not with_stop and bool(self.finished[row, rank]):
            length -= 1
        return self.ids[row, rank, :length]

    @property
    def best(self) -> list[Tensor]:
        """The best sequence for each prompt, 1-D, without its stop id: what a tokenizer decodes."""
        return [self.sequence(row) for row in range(len(self))]

    def to(self, device: torch.device | str) -> Generated:
        """The same on another device."""
        return Generated(
            ids=self.ids.to(device),
            lengths=self.lengths.to(device),
            log_probs=self.log_probs.to(device),
            scores=self.scores.to(device),
            finished=self.finished.to(device),
        )

    def __repr__(self) -> str:
        B, N, T = self.ids.shape
        ended = int(self.finished.sum())
        return f"Generated({B} prompts × {N} sequences, up to {T} ids each, {ended} ended with a stop id)"
