"""FlexAttention baseline of `python -m benchmarks sparse`: masks as functions of a query and a key position.

Masks with data become lookups in a tensor with one or a few values per position.

Compilation takes most of the time of a run. Worker processes therefore run each call once in advance and compile in
parallel; the measuring process reads the kernels from the disk caches of Triton and torch. The workers have ended
before anything is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial, reduce
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.masks import Atom, Documents, Mask, Scattered, fold
from clearhead.masks.regions import PairGrid

if TYPE_CHECKING:
    from benchmarks.sparse import Job, Options

Predicate = Callable[[Tensor, Tensor], Tensor]
# Above this length `create_block_mask` is compiled; otherwise it would allocate T × T values.
_LARGE = 32768


def flex_attention_under(mask: Mask, T: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention compiled for the mask; the block mask is created here, before anything is timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    test = predicate_of(mask, T, device)

    def predicate(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return test(q_idx, kv_idx)

    torch._dynamo.reset()  # otherwise the masks together exceed the recompilation limit
    block_mask = create_block_mask(predicate, None, None, T, T, device=device, _compile=T > _LARGE)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=block_mask)


def predicate_of(mask: Mask, T: int, device: torch.device) -> Predicate:
    """Return a function of scalar tensors p and j: whether query p may attend to key j."""

    def of_leaf(atom: Atom) -> Predicate:
        leaf = atom.leaf
        if isinstance(leaf, Documents):
            ids = leaf.ids.to(device)
            return lambda p, j: (ids[p] == ids[j]) & (ids[p] >= 0)
        if isinstance(leaf, Scattered):
            keys = leaf.sampled_keys(torch.arange(T, device=device)[:, None], T)  # (T, per_row)
            return reduce(either, [_key_at(keys, column) for column in range(keys.shape[1])])
        return lambda p, j: leaf.test(p, j, PairGrid(T, 0))

    def either(a: Predicate, b: Predicate) -> Predicate:
        return lambda p, j: a(p, j) | b(p, j)

    return fold(
        mask,
        leaf=of_leaf,
        and_=lambda a, b: lambda p, j: a(p, j) & b(p, j),
        or_=either,
        not_=lambda a: lambda p, j: ~a(p, j),
        transpose=lambda a: lambda p, j: a(j, p),
    )


def _key_at(keys: Tensor, column: int) -> Predicate:
    """Return whether j is the key in one column of row p."""
    return lambda p, j: keys[p, column] == j


# ---------------------------------------------------------------------- compilation in advance

Key = tuple[str, int, int]  # name of a pattern, length, width; patterns contain functions, which cannot be pickled


def compile_ahead(options: Options, jobs: Sequence[Job], seconds: float) -> set[Key]:
    """Run each job once in `options.workers` processes, for at most `seconds`, and return the keys of finished jobs."""
    done: set[Key] = set()
    if seconds <= 0:
        return done
    pool = ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), initializer=_limit_compile_threads)
    keys = {pool.submit(_run_job, options, job.key, job.flex): job.key for job in jobs}
    try:
        for future in as_completed(keys, timeout=seconds):
            if future.exception() is None:  # a failing job fails again when it is measured, and is noted there
                done.add(keys[future])
    except TimeoutError:
        pass  # the remaining kernels are compiled when they are measured
    processes = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
    return done


def _limit_compile_threads() -> None:
    """Prevent torch's compiler from starting one process per core in each worker."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _run_job(options: Options, key: Key, flex: bool) -> None:
    """Run forward and backward of one row, in a worker."""
    from benchmarks.sparse import attend_under, tensors_for
    from clearhead.masks.catalogue import CATALOGUE

    name, length, width = key
    tensors = tensors_for(options, length, width)
    mask = next(pattern for pattern in CATALOGUE if pattern.name == name).mask(length)
    call = flex_attention_under(mask, length, tensors[0].device) if flex else attend_under(mask)
    call(*tensors[:3])
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    call(*leaves).backward(tensors[3])
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
        del tensors, leaves
        torch.cuda.empty_cache()  # the workers share the memory of one device
