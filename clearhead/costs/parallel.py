"""One step on several GPUs, on paper: what each holds, what each sends, and how long it takes.

`batch` is that of each GPU. Under DDP every GPU has the whole model, and a copy of the gradients in buckets; they are
averaged in a ring, in which each GPU sends 2·(n − 1)/n of them, behind the backward pass. Under FSDP2 each GPU has an
n-th of every parameter (its rows, rounded up), of its gradient and of AdamW's numbers; blocks are gathered one after
the other, before they run forward and again backward, and their gradients are scattered: three times (n − 1) shards."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from clearhead.costs.fit import bytes_of
from clearhead.costs.machine import Machine
from clearhead.costs.result import ADAM, Cost
from clearhead.errors import ConfigError


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
    took = found.time(machine)
    sending = made.sent / link
    # Gradients travel while earlier layers compute theirs; of FSDP's three thirds one goes behind the forward pass.
    hidden, computing = [(sending, took.backward)], took.seconds
    if parallel == "fsdp":
        hidden = [(sending / 3, took.forward), (sending * 2 / 3, took.backward)]
        computing -= took.optimiser * (1 - 1 / gpus)
    seconds = computing + sum(max(0.0, sent - behind) for sent, behind in hidden)
    return Share(**{**asdict(made), "computing": computing, "sending": sending, "seconds": seconds})


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
    others = log.peak_of(("weights", "gradients"))
    peak = others + (2 + ADAM) * shard + gathered
    return Share(n, "fsdp", shard, shard, ADAM * shard, gathered, peak, 3 * (n - 1) * shard)
