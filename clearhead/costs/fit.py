"""Will it fit? The largest batch, and the longest text, whose predicted peak stays inside a given memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clearhead.costs.predict import cost
from clearhead.errors import ConfigError, ShapeError

__all__ = ["Fit", "bytes_of", "fit"]

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

    def peak(tokens: Any, batch: int) -> int:
        return cost(subject, tokens=tokens, batch=batch, **how).memory.peak.value

    most, _ = _largest(lambda n: peak(tokens, n), budget)
    if not isinstance(tokens, int):
        return Fit(budget, most, None)
    longest, at_end = _largest(lambda n: peak(n, batch), budget)
    return Fit(budget, most, longest, at_end)


def _largest(peak: Callable[[int], int], budget: int) -> tuple[int, bool]:
    """The largest n whose peak is inside the budget, and whether n + 1 is refused rather than too large.

    A peak grows with n nearly along a straight line, so each guess is where the line through the last two meets the
    budget; what is refused (learned positions end) only bounds the search from above."""
    known: dict[int, int] = {}
    low, high, refused = 0, _MOST + 1, False

    def look(n: int) -> None:
        nonlocal low, high, refused
        try:
            known[n] = peak(n)
        except ShapeError:
            high, refused = n, True
            return
        if known[n] <= budget:
            low = max(low, n)
        elif n <= high:
            high, refused = n, False

    look(1)
    if low:
        look(2)
    while 0 < low < high - 1:
        (a, first), (b, second) = sorted(known.items(), key=lambda pair: abs(pair[1] - budget))[:2]
        guess = a + (budget - first) * (b - a) // (second - first) if second != first else 2 * low
        middle = (low + high) // 2 if refused and guess >= high else guess
        look(min(max(middle, low + 1), high - 1))
    return low, refused
