"""FlexAttention baseline of `python -m benchmarks sparse`: masks as functions of a query and a key position.

Masks with data become lookups in a tensor with one or a few values per position.

Compilation takes most of the time of a run, so worker processes compile in advance (`benchmarks/ahead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.ahead import run_ahead
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
    tasks = {job.key: partial(_run_job, options, job.key, job.flex) for job in jobs}
    return run_ahead(tasks, workers=options.workers, seconds=seconds)


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
