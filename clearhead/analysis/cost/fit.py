"""Largest batch and length that fit into a memory limit, and the cost of a training step on several GPUs.

`batch` is the batch of each GPU. Under DDP every GPU has the whole model and a copy of the gradients in buckets. The
gradients are averaged by a ring all-reduce, in which each GPU sends 2·(n − 1)/n of them while backward runs. Under
FSDP2 each GPU has 1/n of every parameter (its rows, rounded up), of its gradient and of the AdamW state. Blocks are
gathered one after the other before they run forward and again before backward, and their gradients are scattered:
three times (n − 1) shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from clearhead.analysis.cost.machine import Machine
from clearhead.analysis.cost.predict import AttentionSizes, ModelBuilder, cost
from clearhead.analysis.cost.result import ADAM_STATES, Cost
from clearhead.analysis.inputs.example import Tokens
from clearhead.config import Config
from clearhead.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for kind, base in (("ib", 1024), ("b", 1000), ("", 1024))
}
_SEARCH_LIMIT = 1 << 24  # sequences or tokens


@dataclass(frozen=True)
class MemoryFit:
    """The largest batch and length within a memory limit.

    Attributes:
        memory_limit: Bytes.
        max_batch: Sequences of the requested length; 0 if not even one fits.
        max_tokens: Tokens per sequence of the requested batch, or None if the model takes no sequence.
        is_model_limit: Whether `max_tokens` is the longest that the model takes, rather than a limit of the memory.
    """

    memory_limit: int
    max_batch: int | None
    max_tokens: int | None
    is_model_limit: bool = False


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "24GiB". GiB and G are 1024³, GB is 1000³."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"cannot parse memory size {text!r}; expected for example 24GiB or 512MB")
    n_bytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if n_bytes < 1:
        raise ConfigError(f"memory size {text!r} is less than one byte; expected for example 24GiB or 512MB")
    return n_bytes


def largest_fit(
    subject: Config | nn.Module | AttentionSizes | ModelBuilder | str,
    memory_limit: int,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    **options: Any,
) -> MemoryFit:
    """Find the largest batch for `tokens` and the greatest length for `batch`; `options` are those of `cost`."""

    def peak(tokens: Tokens, batch: int) -> int:
        return cost(subject, tokens=tokens, batch=batch, **options).memory.peak.value

    max_batch = _largest(lambda n: peak(tokens, n), memory_limit, _SEARCH_LIMIT)
    if not isinstance(tokens, int):
        return MemoryFit(memory_limit, max_batch, None)
    model_limit = cost(subject, tokens=tokens, batch=batch, **options).max_len or _SEARCH_LIMIT
    max_tokens = _largest(lambda n: peak(n, batch), memory_limit, model_limit)
    return MemoryFit(memory_limit, max_batch, max_tokens, max_tokens == model_limit)


def _largest(peak: Callable[[int], int], memory_limit: int, most: int) -> int:
    """Return the largest n, up to `most`, whose peak is within the limit.

    The peak is nearly linear in n, so the next guess is where the line through the nearest two points meets the limit,
    and then its right neighbor if the guess fits. If that has not halved the interval, it is bisected."""
    peaks: dict[int, int] = {}
    low = 0
    high = most + 1
    guess = 1
    while low < high - 1:
        for n in (min(max(guess, low + 1), high - 1), low + 1, (low + high) // 2):
            if low < n < high and (n != low + 1 or n == guess or low in peaks):
                peaks[n] = peak(n)
                low, high = (n, high) if peaks[n] <= memory_limit else (low, n)
        nearest = sorted(peaks.items(), key=lambda pair: abs(pair[1] - memory_limit)) * 2
        (a, first), (b, second) = nearest[:2]
        guess = a + (memory_limit - first) * (b - a) // (second - first) if second != first else 2 * low
    return low


# ---------------------------------------------------------------------- several GPUs


@dataclass(frozen=True)
class PerGPUCost:
    """Bytes that one of several GPUs stores and sends in one training step, and the seconds of the step.

    Attributes:
        gathered: Full parameters and gradients of the running blocks (FSDP), or gradient buckets (DDP).
        compute_seconds: Seconds of computation.
        communication_seconds: Seconds of communication.
        seconds: Seconds of the step; communication that overlaps with computation is not added.
    """

    gpus: int
    parallel: str
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    peak: int
    sent: int
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    seconds: float | None = None


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of a rate such as "450GB/s"."""
    rate = re.fullmatch(r"\s*(.+?)\s*/\s*s\s*", text)
    if rate is None:
        raise ConfigError(f"cannot parse bandwidth {text!r}; expected for example 450GB/s")
    return float(parse_bytes(rate[1]))


def cost_per_gpu(
    total: Cost, gpus: int, parallel: str, *, machine: Machine | None = None, interconnect: float | None = None
) -> PerGPUCost:
    """Return the share of each GPU in a training step, with seconds if `machine` and `interconnect` are given.

    Args:
        total: Cost of the training step on one GPU.
        gpus: Number of GPUs, at least 2.
        parallel: "ddp" or "fsdp".
        machine: Each of the GPUs.
        interconnect: Bytes per second that each GPU can send.
    """
    if parallel not in ("ddp", "fsdp"):
        raise ConfigError(f"parallel is {parallel!r}; expected ddp or fsdp")
    if gpus < 2 or not total.training:
        raise ConfigError(
            f"data parallelism needs a training step on at least 2 GPUs; got gpus={gpus}, training={total.training}"
        )
    share = _ddp(total, gpus) if parallel == "ddp" else _fsdp(total, gpus)
    if machine is None or interconnect is None:
        return share
    time = total.time(machine)
    communication = share.sent / interconnect
    # Gradients are sent while earlier layers compute theirs; one third of FSDP's traffic overlaps with forward.
    overlaps = [(communication, time.backward)]
    compute = time.seconds
    if parallel == "fsdp":
        overlaps = [(communication / 3, time.forward), (communication * 2 / 3, time.backward)]
        compute -= time.optimizer * (1 - 1 / gpus)
    seconds = compute + sum(max(0.0, sending - computing) for sending, computing in overlaps)
    return replace(share, compute_seconds=compute, communication_seconds=communication, seconds=seconds)


def _ddp(total: Cost, n: int) -> PerGPUCost:
    parameters = total.memory.parameters.value
    return PerGPUCost(
        gpus=n,
        parallel="ddp",
        parameters=parameters,
        gradients=parameters,
        optimizer=ADAM_STATES * parameters,
        gathered=parameters,
        peak=total.memory.peak.value + parameters,
        sent=2 * parameters * (n - 1) // n,
    )


def _fsdp(total: Cost, n: int) -> PerGPUCost:
    log = total.log
    shard = 0
    groups = {"": 0} | dict.fromkeys(log.blocks, 0)
    for name, parameter in log.parameters.items():
        rows = max(1, parameter.rows)
        shard_bytes = -(-rows // n) * (parameter.n_bytes // rows)
        shard += shard_bytes
        group = next((block for block in log.blocks if name.startswith(f"{block}.")), "")
        groups[group] += shard_bytes * n
    blocks = sorted((size for path, size in groups.items() if path), reverse=True)
    # Parameters outside the blocks are gathered for the whole pass; while a block runs, the next one is gathered.
    gathered = 2 * groups[""] + sum(blocks[:2]) + sum(blocks[:1])
    return PerGPUCost(
        gpus=n,
        parallel="fsdp",
        parameters=shard,
        gradients=shard,
        optimizer=ADAM_STATES * shard,
        gathered=gathered,
        peak=log.peak_bytes(("parameters", "gradients")) + (2 + ADAM_STATES) * shard + gathered,
        sent=3 * (n - 1) * shard,
    )
