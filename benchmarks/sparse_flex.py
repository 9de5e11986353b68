"""FlexAttention with our masks, for `python -m benchmarks sparse`: each mask as a function of one query's and one
key's position.

That is how its users write a mask. Masks with data become lookups in a tensor of one number (or a few) for each
position, the shortest way there is to say them.

Compiling takes most of a run's time, so processes run each call once ahead, their compilers side by side. What they
compile lies in the caches of Triton and of torch on the disk, where the process that measures finds it. They have ended
before anything is timed."""

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
from clearhead.masks.regions import Grid

if TYPE_CHECKING:
    from benchmarks.sparse import Options, Step

Test = Callable[[Tensor, Tensor], Tensor]
# Beyond this a block mask made by plain operations would need T² numbers at once; compiled, it does not.
_LARGE = 32768


def flex_way(mask: Mask, T: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention compiled for the mask; the block mask is made here, before any clock starts."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    test = predicate_of(mask, T, device)

    def predicate(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return test(q_idx, kv_idx)

    torch._dynamo.reset()  # a graph for every mask; the limit on recompilations is meant for one function
    block_mask = create_block_mask(predicate, None, None, T, T, device=device, _compile=T > _LARGE)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=block_mask)


def predicate_of(mask: Mask, T: int, device: torch.device) -> Test:
    """Whether query p may see key j, for numbers p and j that have no dimensions."""

    def test(atom: Atom) -> Test:
        leaf = atom.leaf
        if isinstance(leaf, Documents):
            ids = leaf.ids.to(device)
            return lambda p, j: (ids[p] == ids[j]) & (ids[p] >= 0)
        if isinstance(leaf, Scattered):
            chosen = leaf.sampled_keys(torch.arange(T, device=device)[:, None], T)  # (T, per_row)
            return reduce(either, [_one_of(chosen, place) for place in range(chosen.shape[1])])
        return lambda p, j: leaf.test(p, j, Grid(T, 0))

    def either(a: Test, b: Test) -> Test:
        return lambda p, j: a(p, j) | b(p, j)

    return fold(
        mask,
        leaf=test,
        both=lambda a, b: lambda p, j: a(p, j) & b(p, j),
        either=either,
        inverse=lambda a: lambda p, j: ~a(p, j),
        transposed=lambda a: lambda p, j: a(j, p),
    )


def _one_of(chosen: Tensor, place: int) -> Test:
    return lambda p, j: chosen[p, place] == j


# ---------------------------------------------------------------------- compiling ahead

Key = tuple[str, int, int]  # name of a pattern, length, width: a pattern's own function cannot be sent to a process


def compile_ahead(options: Options, steps: Sequence[Step], seconds: float) -> set[Key]:
    """Runs each step once, FlexAttention or ours, in `options.workers` processes, for so long at most: what is done."""
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
    from benchmarks.sparse import our_way, tensors_for
    from clearhead.masks.catalogue import CATALOGUE

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
