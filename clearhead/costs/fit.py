"""Will it fit? The largest batch, and the longest text, whose predicted peak stays inside a given memory; and one step
on several GPUs, on paper: what each holds, what each sends, and how long it takes.

`batch` is that of each GPU. Under DDP every GPU has the whole model, and a copy of the gradients in buckets; they are
averaged in a ring, in which each GPU sends 2·(n − 1)/n of them, behind the backward pass. Under FSDP2 each GPU has an
n-th of every parameter (its rows, rounded up), of its gradient and of AdamW's numbers; blocks are gathered one after
the other, before they run forward and again backward, and their gradients are scattered: three times (n − 1) shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from clearhead.costs.machine import Machine
from clearhead.costs.predict import cost
from clearhead.costs.result import ADAM, Cost
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

    def peak(tokens: Any, batch: int) -> int:
        return cost(subject, tokens=tokens, batch=batch, **how).memory.peak.value

    most = _largest(lambda n: peak(tokens, n), budget, _MOST)
    if not isinstance(tokens, int):
        return Fit(budget, most, None)
    end = cost(subject, tokens=tokens, batch=batch, **how).longest or _MOST
    longest = _largest(lambda n: peak(n, batch), budget, end)
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


# ---------------------------------------------------------------------- several GPUs


@dataclass(frozen=True)
class Share:
    """What one GPU of several holds and sends in one step, in bytes, and the seconds of that step."""

    gpus: int
    parallel: str
    weights: int
    gradients: int
    optimiser: int
    gathered: int  # whole weights and gradients of the blocks at work (FSDP), or buckets of gradients (DDP)
    peak: int
    sent: int
    computing: float | None = None
    sending: float | None = None
    seconds: float | None = None  # what can hide behind computing is not in it


def link_of(text: str) -> float:
    """ "450GB/s" as bytes a second."""
    rate = re.fullmatch(r"\s*(.+?)\s*/\s*s\s*", text)
    if rate is None:
        raise ConfigError(f"{text!r} is no rate; expected a size of memory a second, such as 450GB/s")
    return float(bytes_of(rate[1]))


def share(found: Cost, gpus: int, parallel: str, *, machine: Machine | None = None, link: float | None = None) -> Share:
    """What a training step of this cost asks of each of `gpus` GPUs."""
    if parallel not in ("ddp", "fsdp"):
        raise ConfigError(f"parallel is {parallel!r}; expected ddp or fsdp")
    if gpus < 2 or not found.training:
        got = f"gpus={gpus}, training={found.training}"
        raise ConfigError(f"sharing is for a training step on at least 2 GPUs; got {got}")
    made = _ddp(found, gpus) if parallel == "ddp" else _fsdp(found, gpus)
    if machine is None or link is None:
        return made
    took, sending = found.time(machine), made.sent / link
    # Gradients travel while earlier layers compute theirs; of FSDP's three thirds one goes behind the forward pass.
    hidden, computing = [(sending, took.backward)], took.seconds
    if parallel == "fsdp":
        hidden = [(sending / 3, took.forward), (sending * 2 / 3, took.backward)]
        computing -= took.optimiser * (1 - 1 / gpus)
    seconds = computing + sum(max(0.0, sent - behind) for sent, behind in hidden)
    return replace(made, computing=computing, sending=sending, seconds=seconds)


def _ddp(found: Cost, n: int) -> Share:
    whole = found.memory.weights.value
    sent = 2 * whole * (n - 1) // n
    return Share(n, "ddp", whole, whole, ADAM * whole, whole, found.memory.peak.value + whole, sent)


def _fsdp(found: Cost, n: int) -> Share:
    log = found.log
    shard, groups = 0, {"": 0} | dict.fromkeys(log.blocks, 0)
    for name, parameter in log.parameters.items():
        rows = max(1, parameter.rows)
        own = -(-rows // n) * (parameter.n_bytes // rows)
        shard += own
        group = next((block for block in log.blocks if name.startswith(f"{block}.")), "")
        groups[group] += own * n
    blocks = sorted((size for path, size in groups.items() if path), reverse=True)
    # What belongs to no block is gathered for the whole pass; of the blocks one runs and the next one comes in.
    gathered = 2 * groups[""] + sum(blocks[:2]) + sum(blocks[:1])
    peak = log.peak_of(("weights", "gradients")) + (2 + ADAM) * shard + gathered
    return Share(n, "fsdp", shard, shard, ADAM * shard, gathered, peak, 3 * (n - 1) * shard)
