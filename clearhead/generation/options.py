"""Decoding strategies.

`Greedy`, `Sample` and `BeamSearch` are frozen, validated values; `generate` and `stream` take one as `strategy=`. The
loops that run them are in `token_loop.py` (greedy decoding, sampling) and `beam.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from clearhead._core.keywords import explain_keywords
from clearhead._core.validation import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Range, require
from clearhead.config import Validated


@explain_keywords
@dataclass(frozen=True)
class Greedy:
    """Choose the most likely id at every step.

    The resulting sequence is not necessarily the most likely one; `BeamSearch` considers several.
    """


@explain_keywords
@dataclass(frozen=True)
class Sample(Validated):
    """Sample each id from the model's distribution after these filters, in this order.

    No filter separates equally likely ids, so `top_k` may keep more than k ids if there are ties, and every filter
    keeps at least one id. A sample depends only on the seed, the step and the index of the prompt: not on the number of
    other rows, on when they end, on `max_new_tokens`, on the cache or on the state of the device's RNG.

    Args:
        temperature: Divides the logits. Below 1 sharpens the distribution, above 1 flattens it; use `Greedy()` for 0.
        top_k: Keep the k most likely ids.
        top_p: Keep the smallest set of most likely ids whose total probability is at least `top_p`.
        min_p: Keep ids whose probability is at least `min_p` times the largest.
        seed: Seed of the counter-based RNG.
    """

    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Range(gt=0, le=1)] | None = None
    min_p: Probability | None = None
    seed: NonNegativeInt = 0

    def validate(self) -> None:
        """Raise `ConfigError` if the temperature is 0."""
        require(
            self.temperature > 0,
            f"Sample: temperature is {self.temperature:g}; expected a number above 0 (use Greedy() for the limit 0)",
        )


@explain_keywords
@dataclass(frozen=True)
class BeamSearch(Validated):
    """Beam search: keep `width` hypotheses per prompt and return the `n_best` best finished ones, best first.

    A sequence of n new ids (including its stop id) scores Σ log p / n**length_penalty. A hypothesis finishes when a
    stop id is among the `width` best continuations; at `max_new_tokens` all of the `width` best compete. The search for
    a prompt ends as `early_stopping` says, or earlier if no live hypothesis can exceed the score of the n_best-th
    finished one, which does not change the result. Ties go to the smaller id, so `BeamSearch(1)` equals `Greedy()`.
    The results are those of `num_beams=width` in transformers.

    Args:
        width: Number of hypotheses per prompt.
        length_penalty: Exponent of the length. 0 scores by log-probability, which favors short sequences; 1 by the mean
            per id; negative values reward short sequences.
        n_best: Number of sequences to return per prompt.
        early_stopping: When to end, once `width` sequences have finished. True: at once. False: when the best live
            hypothesis, scored at its present length, does not exceed the worst of them. "never": when it could not even
            at the length that favors it most.
    """

    width: PositiveInt = 4
    length_penalty: Annotated[float, Range()] = 1.0
    n_best: PositiveInt = 1
    early_stopping: Literal[False, True, "never"] = False

    def validate(self) -> None:
        """Raise `ConfigError` if more sequences are requested than hypotheses are kept."""
        require(
            self.n_best <= self.width,
            f"BeamSearch: n_best is {self.n_best} and width {self.width}; expected n_best <= width: give "
            f"width={self.n_best} or more",
        )


Strategy = Greedy | Sample | BeamSearch
