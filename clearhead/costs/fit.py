"""Will it fit? The largest batch, and the longest text, whose predicted peak stays inside a given memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clearhead.costs.predict import cost
from clearhead.costs.result import Cost
from clearhead.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for kind, base in (("ib", 1024), ("b", 1000), ("", 1024))
}
_MOST = 1 << 24  # no search goes beyond this many sequences or tokens


@dataclass(frozen=True)
class Fit:
    """`batch` sequences of the asked length, or `tokens` in each of the asked batch; 0 where not even one fits, None
    where there is nothing to choose. `at_end` says that the length is the longest that the model takes, not the
    memory's limit."""

    budget: int
    batch: int | None
    tokens: int | None
    at_end: bool = False


def bytes_of(text: str) -> int:
    """ "24GiB" as a number of bytes. GiB and G are 1024³, GB is 1000³."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is no size of memory; expected a number and a unit, such as 24GiB or 512MB")
    found = int(float(match[1]) * _UNITS[match[2].lower()])
    if found < 1:
        raise ConfigError(f"{text!r} is no memory at all; expected at least one byte")
    return found


def fit(subject: Any, budget: int, *, tokens: Any = None, batch: int = 1, **how: Any) -> Fit:
    """The largest batch at these `tokens`, and the greatest length at this `batch`; `how` goes to `cost`."""

    def price(tokens: Any, batch: int) -> Cost:
        return cost(subject, tokens=tokens, batch=batch, **how)

    most = _largest(lambda n: price(tokens, n).memory.peak.value, budget, _MOST)
    if not isinstance(tokens, int):
        return Fit(budget, most, None)
    end = price(tokens, batch).longest or _MOST
    longest = _largest(lambda n: price(n, batch).memory.peak.value, budget, end)
    return Fit(budget, most, longest, longest == end)


def _largest(peak: Callable[[int], int], budget: int, most: int) -> int:
    """The largest n, up to `most`, whose peak is inside the budget.

    A peak grows with n nearly along a straight line: a guess is where the line through the nearest two meets the limit,
    and the guess after it looks right beside what fits. Where that has not halved the search, it is halved."""
    known: dict[int, int] = {}
    low, high, guess = 0, most + 1, 1
    while low < high - 1:
        for n in (min(max(guess, low + 1), high - 1), low + 1, (low + high) // 2):
            if low < n < high and (n != low + 1 or n == guess or low in known):
                known[n] = peak(n)
                low, high = (n, high) if known[n] <= budget else (low, n)
        (a, first), (b, second) = (sorted(known.items(), key=lambda pair: abs(pair[1] - budget)) * 2)[:2]
        guess = a + (budget - first) * (b - a) // (second - first) if second != first else 2 * low
    return low
