"""How the next id is chosen: always the likeliest, drawn by chance, or by keeping several beginnings alive.

Each way is a frozen value that carries its own parameters and refuses those that make no sense; `generate` and `stream`
take one as `how=`. The searches themselves are in `walk.py` (one id after the other) and `beam.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from clearhead.errors import ConfigError

__all__ = ["Beam", "Greedy", "How", "Sample"]


@dataclass(frozen=True)
class Greedy:
    """The likeliest id at every step. The whole need not be the likeliest: `Beam` looks further."""


@dataclass(frozen=True)
class Sample:
    """Each id is drawn from the model's distribution, reshaped in this order:

    1. `temperature` divides the logits: below 1 is bolder, above 1 more varied. (0 would be `Greedy()`.)
    2. `top_k` keeps the k likeliest ids.
    3. `top_p` keeps the fewest of the likeliest remaining ids that together have at least this much of what
       remains.
    4. `min_p` keeps ids at least this many times as likely as the likeliest.

    A filter keeps or drops equally likely ids together, so top_k may keep more than k where there are ties.
    At least one id is always left. What is drawn depends on `seed`, the step and the row's place among the
    prompts, and on nothing else: not on how many other rows there are or when they end, on `max_new`, on the
    cache or on the device's own random numbers.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (_is_real(self.temperature) and math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                f"Sample: temperature is {self.temperature!r}; expected a finite number above 0 "
                "(for the limit 0, the likeliest id always, use Greedy())"
            )
        if self.top_k is not None:
            _whole("Sample", "top_k", self.top_k, least=1)
        if self.top_p is not None and not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError(f"Sample: top_p is {self.top_p!r}; expected a probability above 0 and at most 1")
        if self.min_p is not None and not (_is_real(self.min_p) and 0 <= self.min_p <= 1):
            raise ConfigError(f"Sample: min_p is {self.min_p!r}; expected a fraction from 0 to 1")
        _whole("Sample", "seed", self.seed, least=0)


@dataclass(frozen=True)
class Beam:
    """Beam search: `width` beginnings are kept alive, and the `n_best` best endings are returned, best first.

    A sequence of n new ids (its stop id counts) scores Σ log p / n**length_penalty. At 0 that is the plain
    log-probability, which favours short sequences; at 1 the mean per id; below 0 shortness is rewarded. A
    beginning ends when a stop id is among the `width` best continuations. The search for a prompt is over
    when `width` sequences have ended, when `max_new` is reached (what is alive then competes as it is,
    unfinished), or as soon as nothing alive could still score better than the n_best-th ended one, which
    changes no answer. Of equals the earlier id is taken, so that `Beam(1)` is `Greedy()`.
    """

    width: int = 4
    length_penalty: float = 1.0
    n_best: int = 1

    def __post_init__(self) -> None:
        _whole("Beam", "width", self.width, least=1)
        if not (_is_real(self.length_penalty) and math.isfinite(self.length_penalty)):
            raise ConfigError(f"Beam: length_penalty is {self.length_penalty!r}; expected a finite number")
        _whole("Beam", "n_best", self.n_best, least=1)
        if self.n_best > self.width:
            raise ConfigError(
                f"Beam: n_best is {self.n_best} and width {self.width}; a search returns at most as many "
                f"sequences as it keeps alive: give width={self.n_best} or more"
            )


How = Greedy | Sample | Beam


def check_how(how: Any, choices: tuple[type, ...] = (Greedy, Sample, Beam)) -> None:
    """Refuses what is no way to choose, and names the usual slip (the class without brackets)."""
    if isinstance(how, choices):
        return
    slip = "; that is the class: add the brackets" if isinstance(how, type) else ""
    names = ", ".join(f"{choice.__name__}(…)" for choice in choices)
    raise ConfigError(f"how is {how!r}; expected one of {names}{slip}")


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(owner: str, name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{owner}: {name} is {value!r}; expected a whole number of at least {least}")
