"""The choice of impl="auto" in wall-clock time, compared with the faster of "sparse" and "sdpa"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.changing.lengths import run_once
from benchmarks.changing.options import QKV, Options, attend_under, forward_backward, move_data, tensors
from benchmarks.timed import Contender, Job, Timing, time_contenders
from clearhead.attention.observe import Impl
from clearhead.masks import Mask
from clearhead.masks.catalogue import Pattern

# Coarse first: a run that ends early has covered the whole range.
LENGTHS = (4096, 1024, 16384, 256, 65536, 2048, 512, 8192, 32768)
BATCHES = (1, 8)
FORWARD_LENGTHS = (4096, 1024, 16384)
IMPLS: tuple[Impl, ...] = ("sparse", "auto", "sdpa")
MAX_SLOWDOWN = 1.05
MAX_MASK_ELEMENTS = 1 << 28  # of a T × T mask of "sdpa"; beyond, "sparse" is taken as the best


def jobs(options: Options) -> Iterator[Job]:
    """Return one job for each pass, length, batch size and mask of the catalogue."""
    for passes, default in (("forward + backward", LENGTHS), ("forward", FORWARD_LENGTHS)):
        for length in options.lengths_or(default):
            for batch in options.batches_or(BATCHES):
                for pattern in options.catalogue:
                    sizes = {"batch": batch, "length": length}
                    row = Timing(section="auto", name=f"{pattern.name}, {passes}", sizes=sizes)
                    measure = partial(_measure, options, pattern, passes == "forward", batch, length)
                    ahead = (partial(run_once, options, pattern.name, 1024 if length < 8192 else 16384),)
                    yield Job(row, measure, ahead)


def _measure(options: Options, pattern: Pattern, forward: bool, batch: int, length: int, row: Timing) -> None:
    """Measure one row."""
    row.targets = {"auto / best": MAX_SLOWDOWN, "sparse / sdpa": None}
    mask = move_data(pattern.mask(length), options.device)
    qkv, grad = tensors(options, batch, length)
    run = _forward if forward else forward_backward
    impls = IMPLS if pattern.name == "causal" or length**2 <= MAX_MASK_ELEMENTS else IMPLS[:2]
    contenders = [_contender(run, mask, impl, qkv, grad) for impl in impls]
    time_contenders(row, contenders, seconds=options.seconds, device=options.device)
    if len(impls) < len(IMPLS):
        row.notes["sdpa"] = f"not measured: its mask has {length**2:,} elements"
    alternatives = [row.times[impl] for impl in ("sparse", "sdpa") if impl in row.times]
    if alternatives:
        row.times["best"] = min(alternatives)


def _contender(run: Callable[..., None], mask: Mask, impl: Impl, qkv: QKV, grad: Tensor) -> Contender:
    """Return one implementation."""
    return Contender(impl, lambda step: run(attend_under(mask, impl), qkv, grad), stops_early=impl == "sdpa")


@torch.no_grad()
def _forward(attention: Callable[..., Tensor], qkv: QKV, grad: Tensor) -> None:
    """Run attention without gradients."""
    attention(*qkv)
