"""A new length at every step (random within ±25 %), compared with a repeated length, for a catalogue of masks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.changing.options import (
    QKV,
    Options,
    attend_under,
    forward_backward,
    move_data,
    sparse_impl,
    tensors,
)
from benchmarks.timed import Contender, Job, Timing, time_contenders
from clearhead.masks import Mask
from clearhead.masks.catalogue import CATALOGUE, Pattern

LENGTHS = (16384, 4096)
BATCHES = (1,)
VARIATION = 0.25

Arguments = tuple[Mask, QKV, Tensor]


def jobs(options: Options) -> Iterator[Job]:
    """Return one job for each batch size, length and mask of the catalogue."""
    for batch in options.batches_or(BATCHES):
        for length in options.lengths_or(LENGTHS):
            for pattern in options.catalogue:
                row = Timing(section="lengths", name=pattern.name, sizes={"batch": batch, "length": length})
                ahead = (partial(run_once, options, pattern.name, 1024 if length < 8192 else 16384),)
                yield Job(row, partial(_measure, options, pattern, batch, length), ahead)


def random_lengths(length: int) -> list[int]:
    """Return distinct lengths within ±25 %, in random order."""
    low, high = round(length * (1 - VARIATION)), round(length * (1 + VARIATION))
    generator = torch.Generator().manual_seed(length)
    return (low + torch.randperm(high - low + 1, generator=generator)).tolist()


def _measure(options: Options, pattern: Pattern, batch: int, length: int, row: Timing) -> None:
    """Measure one row."""
    row.targets = {"changing / repeated": 1.3}
    lengths = random_lengths(length)
    qkv, grad = tensors(options, batch, max(lengths))

    def prepare(T: int) -> Arguments:
        q, k, v, part = (x.detach()[:, :, :T].contiguous() for x in (*qkv, grad))
        mask = move_data(pattern.mask(T), options.device)
        return mask, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), part

    unchanged = prepare(length)
    contenders = [
        Contender("repeated", lambda step: _run(unchanged)),
        Contender("changing", _run, lambda step: prepare(lengths[step % len(lengths)])),
    ]
    time_contenders(row, contenders, seconds=options.seconds, device=options.device)


def _run(arguments: Arguments) -> None:
    """Run forward and backward."""
    mask, qkv, grad = arguments
    forward_backward(attend_under(mask, sparse_impl(mask)), qkv, grad)


def run_once(options: Options, name: str, length: int) -> None:
    """Compile the kernels of a mask, in a worker."""
    mask = next(pattern.mask(length) for pattern in CATALOGUE if pattern.name == name)
    mask = move_data(mask, options.device)
    _run((mask, *tensors(options, 1, length)))
