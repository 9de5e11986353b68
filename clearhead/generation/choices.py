"""How the next id is chosen (always the likeliest, drawn by chance, or by keeping several beginnings alive), and what
comes out: `Generated`, all of it at the end, and `Step`, one id a row while it is being made.

Each way is a frozen value that carries its own parameters and refuses those that make no sense; `generate` and `stream`
take one as `how=`. The searches themselves are in `walk.py` (one id after the other) and `beam.py`.

    B prompts   N sequences for each prompt, best first   T new ids of the longest"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import torch
from torch import Tensor

from clearhead._shapes import Bool, Float, Int
from clearhead.config import Value
from clearhead.values import Count, Natural, NotNegative, Range, Share, require


@dataclass(frozen=True)
class Greedy:
    """The likeliest id at every step. The whole need not be the likeliest: `Beam` looks further."""


@dataclass(frozen=True)
class Sample(Value):
    """Each id is drawn from the model's distribution, reshaped in this order:

    1. `temperature` divides the logits: below 1 is bolder, above 1 more varied. (0 would be `Greedy()`.)
    2. `top_k` keeps the k likeliest ids.
    3. `top_p` keeps the fewest of the likeliest remaining ids that together have at least this much of what
       remains.
    4. `min_p` keeps ids at least this many times as likely as the likeliest.

    A filter keeps or drops equally likely ids together, so top_k may keep more than k where there are ties.
    At least one id is always left. What is drawn depends on `seed`, the step and the row's place among the
    prompts, and on nothing else: not on how many other rows there are or when they end, on `max_new`, on the
    cache or on the device's own random numbers."""

    temperature: NotNegative = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Range(above=0, most=1)] | None = None
    min_p: Share | None = None
    seed: Natural = 0

    def validate(self) -> None:
        require(
            self.temperature > 0,
            f"Sample: temperature is {self.temperature:g}; expected a number above 0 (for the limit 0, the likeliest "
            "id always, use Greedy())",
        )


@dataclass(frozen=True)
class Beam(Value):
    """Beam search: `width` beginnings are kept alive, and the `n_best` best endings are returned, best first.

    A sequence of n new ids (its stop id counts) scores Σ log p / n**length_penalty. At 0 that is the plain
    log-probability, which favours short sequences; at 1 the mean per id; below 0 shortness is rewarded. A
    beginning ends when a stop id is among the `width` best continuations. The search for a prompt is over
    when `width` sequences have ended, when `max_new` is reached (what is alive then competes as it is,
    unfinished), or as soon as nothing alive could still score better than the n_best-th ended one, which
    changes no answer. Of equals the earlier id is taken, so that `Beam(1)` is `Greedy()`."""

    width: Count = 4
    length_penalty: Annotated[float, Range()] = 1.0
    n_best: Count = 1

    def validate(self) -> None:
        require(
            self.n_best <= self.width,
            f"Beam: n_best is {self.n_best} and width {self.width}; a search returns at most as many sequences as it "
            f"keeps alive: give width={self.n_best} or more",
        )


How = Greedy | Sample | Beam


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
        drops_stop = not with_stop and bool(self.finished[row, rank])
        return self.ids[row, rank, : int(self.lengths[row, rank]) - drops_stop]

    @property
    def best(self) -> list[Tensor]:
        """The best sequence for each prompt, 1-D, without its stop id: what a tokenizer decodes."""
        return [self.sequence(row) for row in range(len(self))]

    def to(self, device: torch.device | str) -> Generated:
        """The same on another device."""
        return Generated(*(getattr(self, field.name).to(device) for field in fields(self)))

    def __repr__(self) -> str:
        B, N, T = self.ids.shape
        ended = int(self.finished.sum())
        return f"Generated({B} prompts × {N} sequences, up to {T} ids each, {ended} ended with a stop id)"
