"""Host time of attention calls: the time until a call returns, while the device is never the bottleneck.

The inputs are short, and many calls are made without waiting for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.changing.layouts import draw_layout
from benchmarks.changing.options import Options, attend_under, forward_backward, tensors
from benchmarks.timed import Job, Timing, synchronize
from clearhead.attention import attend
from clearhead.masks import causal, documents, every, window

LENGTH = 512
CALLS = 30  # without synchronization; a GPU queues about a thousand kernels
ROUNDS = 15
PLAIN_MARGIN = 0.025  # ms above the time of scaled_dot_product_attention
SPARSE_LIMIT = 0.300  # ms of forward and backward together

Call = Callable[[], object]


def jobs(options: Options) -> Iterator[Job]:
    """Return the jobs of the section."""
    measures = {
        "attend without a mask": _measure_plain,
        "attend under causal()": _measure_causal,
        "sparse forward + backward, same mask": _measure_sparse,
        "sparse forward + backward, new documents": _measure_documents,
    }
    for name, measure in measures.items():
        if options.name_filter in name:
            row = Timing(section="host", name=name, sizes={"length": LENGTH})
            yield Job(row, partial(measure, options))


def host_times(options: Options, *calls: Call) -> list[float]:
    """Return the median milliseconds until each call returns, measured alternately."""
    times: list[list[float]] = [[] for _ in calls]
    n_calls = 2 if options.smoke else CALLS
    for call in calls:
        call()
        call()
    for _ in range(2 if options.smoke else ROUNDS):
        for call, call_times in zip(calls, times, strict=True):
            synchronize(options.device)
            start = time.perf_counter()
            for _ in range(n_calls):
                call()
            call_times.append(1e3 * (time.perf_counter() - start) / n_calls)
    synchronize(options.device)
    return [median(call_times) for call_times in times]


@torch.no_grad()
def _measure_plain(options: Options, row: Timing) -> None:
    """Compare `attend` without a mask with torch's function."""
    (q, k, v), _ = tensors(options, 1, LENGTH)
    _add_plain(row, options, partial(attend, q, k, v), partial(F.scaled_dot_product_attention, q, k, v))


@torch.no_grad()
def _measure_causal(options: Options, row: Timing) -> None:
    """Compare `attend` under causal() with torch's function."""
    (q, k, v), _ = tensors(options, 1, LENGTH)
    baseline = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    mask = causal()
    _add_plain(row, options, lambda: attend(q, k, v, mask), baseline)


def _add_plain(row: Timing, options: Options, call: Call, baseline: Call) -> None:
    """Add the times of a forward call and of torch's function, and the limit."""
    row.times["attend"], row.times["sdpa"] = host_times(options, call, baseline)
    row.times["limit"] = row.times["sdpa"] + PLAIN_MARGIN
    row.targets = {"attend / limit": 1.0, "attend / sdpa": None}


def _measure_sparse(options: Options, row: Timing) -> None:
    """Measure forward and backward under an unchanged mask."""
    qkv, grad = tensors(options, 1, LENGTH)
    attention = attend_under(causal() & (window(64, 0) | every(32)), "sparse")
    _add_sparse(row, options, lambda: forward_backward(attention, qkv, grad))


def _measure_documents(options: Options, row: Timing) -> None:
    """Measure forward and backward under a new document mask at each call, including the copy of its ids."""
    qkv, grad = tensors(options, 1, LENGTH)
    ids = draw_layout(0, 1, LENGTH, options.device).ids

    def call() -> None:
        forward_backward(attend_under(causal() & documents(ids.clone()), "sparse"), qkv, grad)

    _add_sparse(row, options, call)


def _add_sparse(row: Timing, options: Options, call: Call) -> None:
    """Add the time of a forward and backward call, and the limit."""
    (row.times["sparse"],) = host_times(options, call)
    row.times["limit"] = SPARSE_LIMIT
    row.targets = {"sparse / limit": 1.0}
