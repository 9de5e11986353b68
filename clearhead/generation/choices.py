"""How the next id is chosen: always the likeliest, drawn by chance, or by keeping several beginnings alive.

Each way is a frozen value that carries its own parameters and refuses those that make no sense; `generate` and `stream`
take one as `how=`. The searches themselves are in `walk.py` (one id after the other) and `beam.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Union

from clearhead.config import Value
from clearhead.values import Count, Natural, NotNegative, Range, Share, checked, require

__all__ = ["Beam", "Greedy", "How", "Sample"]


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


def check_how(how: Any, choices: tuple[type, ...] = (Greedy, Sample, Beam)) -> None:
    """Refuses what is no way to choose."""
    checked(how, "how", Union[choices])  # noqa: UP007  (a union of what is given can be written only so)
