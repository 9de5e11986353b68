"""FlexAttention with our masks, for `clearhead bench sparse`: each mask as a function of one query's and one
key's position.

That is how its users write a mask. Masks with data become lookups in a tensor of one number (or a few) for each
position, the shortest way there is to say them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from clearhead.masks import Atom, Documents, Mask, Scattered, fold
from clearhead.masks.geometry import Grid

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
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask)
        return out

    return run


def predicate_of(mask: Mask, T: int, device: torch.device) -> Test:
    """Whether query p may see key j, for numbers p and j that have no dimensions."""

    def test(atom: Atom) -> Test:
        leaf = atom.leaf
        if isinstance(leaf, Documents):
            ids = leaf.ids.to(device)
            return lambda p, j: (ids[p] == ids[j]) & (ids[p] >= 0)
        if isinstance(leaf, Scattered):
            chosen = leaf.listed(torch.arange(T, device=device)[:, None], T)  # (T, per_row)
            return reduce(either, [_one_of(chosen, place) for place in range(chosen.shape[1])])
        return lambda p, j: leaf.test(p, j, Grid(T, 0))

    def both(a: Test, b: Test) -> Test:
        return lambda p, j: a(p, j) & b(p, j)

    def either(a: Test, b: Test) -> Test:
        return lambda p, j: a(p, j) | b(p, j)

    def inverse(a: Test) -> Test:
        return lambda p, j: ~a(p, j)

    def transposed(a: Test) -> Test:
        return lambda p, j: a(j, p)

    return fold(mask, leaf=test, both=both, either=either, inverse=inverse, transposed=transposed)


def _one_of(chosen: Tensor, place: int) -> Test:
    return lambda p, j: chosen[p, place] == j
