"""Compiling ahead for `clearhead bench sparse`: processes that run each call once, their compilers side by side.

What they compile lies in the caches of Triton and of torch on the disk, where the process that measures finds it. They
have ended before anything is timed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.bench.sparse import Options, Step

Key = tuple[str, int, int]
"""The name of a pattern, length, width: a pattern's own function cannot be sent to a process."""


def compile_ahead(options: Options, steps: Sequence[Step], seconds: float) -> set[Key]:
    """Runs each step once, FlexAttention or ours, in `options.workers` processes, for so long at most.

    Returns what was done.
    """
    done: set[Key] = set()
    if seconds <= 0:
        return done
    pool = ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), initializer=_alone)
    jobs = {pool.submit(_once, options, step.key, step.flex): step.key for step in steps}
    try:
        for future in as_completed(jobs, timeout=seconds):
            if future.exception() is None:  # what fails here fails again when it is measured, and is noted there
                done.add(jobs[future])
    except TimeoutError:
        pass  # the rest is compiled when it is measured
    processes = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
    return done


def _alone() -> None:
    """torch's compiler would start a process for every core, in each of these processes."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _once(options: Options, key: Key, flex: bool) -> None:
    """Forward and backward of one row, in a process of the pool."""
    import torch

    from clearhead.bench.sparse import our_way, tensors_for
    from clearhead.bench.sparse_flex import flex_way
    from clearhead.bench.sparse_masks import CATALOGUE

    name, length, width = key
    tensors = tensors_for(options, length, width)
    mask = next(pattern for pattern in CATALOGUE if pattern.name == name).mask(length)
    way = flex_way(mask, length, tensors[0].device) if flex else our_way(mask)
    way(*tensors[:3])
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    way(*leaves).backward(tensors[3])
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
        del tensors, leaves
        torch.cuda.empty_cache()  # the processes share one device's memory
