"""Decoding strategies and results of generation.

`Greedy`, `Sample` and `BeamSearch` are frozen, validated values; `generate` and `stream` take one as `strategy=`.
`Generated` is the complete result, `GenerationStep` one step of a stream. The searches themselves are in `walk.py`
(greedy, sampling) and `beam.py`.

    B prompts   N sequences per prompt, best first   T new ids of the longest sequence
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import torch
from torch import Tensor

from clearhead._core.shapes import Bool, Float, Int
from clearhead._core.validation import Count, Natural, NotNegative, Range, Share, require
from clearhead.config import Value


@dataclass(frozen=True)
class Greedy:
    """Choose the most likely id at every step.

    The resulting sequence is not necessarily the most likely one; `BeamSearch` considers several.
    """


@dataclass(frozen=True)
class Sample(Value):
    """Sample each id from the model's distribution after these filters, in this order.

    Each filter treats equally likely ids alike, so `top_k` may keep more than k ids if there are ties, and every filter
    keeps at least one id. A sample depends only on the seed, the step and the index of the prompt: not on the number of
    other rows, on when they end, on `max_new_tokens`, on the cache or on the state of the device's RNG.

    Args:
        temperature: Divides the logits. Below 1 sharpens the distribution, above 1 flattens it; use `Greedy()` for 0.
        top_k: Keep the k most likely ids.
        top_p: Keep the smallest set of most likely ids whose total probability is at least `top_p`.
        min_p: Keep ids whose probability is at least `min_p` times the largest.
        seed: Seed of the counter-based RNG.
    """

    temperature: NotNegative = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Range(above=0, most=1)] | None = None
    min_p: Share | None = None
    seed: Natural = 0

    def validate(self) -> None:
        """Raise `ConfigError` if the temperature is 0."""
        require(
            self.temperature > 0,
            f"Sample: temperature is {self.temperature:g}; expected a number above 0 (use Greedy() for the limit 0)",
        )


@dataclass(frozen=True)
class BeamSearch(Value):
    """Beam search: keep `width` hypotheses per prompt and return the `n_best` best finished ones, best first.

    A sequence of n new ids (including its stop id) scores Σ log p / n**length_penalty. A hypothesis finishes when a
    stop id is among the `width` best continuations. The search for a prompt ends when `width` sequences have finished,
    when `max_new_tokens` is reached (then unfinished hypotheses compete too), or as soon as no live hypothesis can
    exceed the score of the n_best-th finished one, which does not change the result. Ties go to the smaller id, so
    `BeamSearch(1)` equals `Greedy()`.

    Args:
        width: Number of hypotheses per prompt.
        length_penalty: Exponent of the length. 0 scores by log-probability, which favors short sequences; 1 by the mean
            per id; negative values reward short sequences.
        n_best: Number of sequences to return per prompt.
    """

    width: Count = 4
    length_penalty: Annotated[float, Range()] = 1.0
    n_best: Count = 1

    def validate(self) -> None:
        """Raise `ConfigError` if more sequences are requested than hypotheses are kept."""
        require(
            self.n_best <= self.width,
            f"BeamSearch: n_best is {self.n_best} and width {self.width}; expected n_best <= width: give "
            f"width={self.n_best} or more",
        )


Strategy = Greedy | Sample | BeamSearch


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
