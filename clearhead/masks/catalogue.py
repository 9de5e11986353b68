"""Well-known attention patterns as expressions, named by their papers, and those that the benchmarks measure.

    from clearhead.masks import catalogue

    print(catalogue.sliding_window_with_sinks(size=1024, sinks=4))  # causal() & (window(1023, 0) | prefix(4))

Each function returns a mask; all of them except those of data are structural, so that they print, parse, and can be
stored in configurations. `CATALOGUE` is the list that `python -m benchmarks sparse` measures at any length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import Mask, check_integer
from clearhead.masks.data import documents, integer_tensor
from clearhead.masks.grids import axis, check_sizes, clamped
from clearhead.masks.selection import intervals, selected
from clearhead.masks.structural import blocks, causal, dilated, every, prefix, scattered, window


@dataclass(frozen=True)
class Pattern:
    """A mask for each length, and what it is held to: fractions of dense time, forward and forward + backward."""

    name: str
    mask: Callable[[int], Mask]
    forward: float | None = None
    both: float | None = None


def _fixed(mask: Mask) -> Callable[[int], Mask]:
    return lambda T: mask


def _documents(T: int) -> Mask:
    """Documents of mixed lengths, about 1/12 of the sequence on average, the same for every run."""
    generator = torch.Generator().manual_seed(403)
    cuts = torch.randint(1, T, (11,), generator=generator).sort().values
    ids = torch.zeros(T, dtype=torch.int64)
    ids[cuts] = 1
    return documents(ids.cumsum(0))


CATALOGUE = (
    Pattern("the course's pattern", _fixed(window(2, 2) | every(4)), 0.30, 0.33),
    Pattern("window and landmarks", _fixed(window(128, 128) | every(64)), 0.06, 0.08),
    Pattern("causal window and landmarks", _fixed(causal() & (window(256, 0) | every(128))), 0.05, 0.07),
    Pattern("window", _fixed(window(256, 256)), 0.06, 0.08),
    Pattern("causal", _fixed(causal())),
    Pattern("narrow window", _fixed(window(2, 2))),
    Pattern("packed documents", _documents),
    Pattern("packed documents, causal", lambda T: causal() & _documents(T)),
    Pattern("prefix language model", lambda T: causal() | prefix(T // 8)),
    Pattern("Longformer", _fixed(window(256, 256) | prefix(64) | prefix(64).T)),
    Pattern("BigBird", _fixed(window(96, 96) | prefix(64) | prefix(64).T | scattered(3, seed=1))),
    Pattern("Sparse Transformer, strided", _fixed(causal() & (window(128, 0) | dilated(128)))),
    Pattern("Sparse Transformer, fixed", _fixed(causal() & (blocks(128) | every(128, start=127)))),
    Pattern("dilated window", _fixed(window(1024, 1024) & dilated(4))),
    Pattern("sinks and a window", _fixed(causal() & (window(1024, 0) | prefix(4)))),
    Pattern("the landmarks look back", _fixed((window(128, 128) | every(64)).T)),
    Pattern("anti-causal window", _fixed((causal() & window(512, 0)).T)),
    Pattern("random scatter", _fixed(scattered(16, seed=7))),
)


# -- text -------------------------------------------------------------------------------------------------------------


def prefix_lm(n: int) -> Mask:
    """Return the prefix language model: the first n tokens see each other, later ones see everything before them."""
    return causal() | prefix(n)


def sliding_window(size: int) -> Mask:
    """Return causal attention to the last `size` tokens, the query included (Mistral 7B, 2023)."""
    return causal() & window(check_integer(size, "the size of sliding_window", least=1) - 1, 0)


def sliding_window_with_sinks(size: int, sinks: int) -> Mask:
    """Return causal attention to the last `size` tokens and the first `sinks` ones (StreamingLLM, 2023)."""
    size = check_integer(size, "the size of sliding_window_with_sinks", least=1)
    return causal() & (window(size - 1, 0) | prefix(sinks))


def dilated_window(reach: int, step: int) -> Mask:
    """Return every `step`-th token up to `reach` positions away on both sides (Longformer, 2020)."""
    return window(reach, reach) & dilated(step)


def longformer(reach: int, n_global: int) -> Mask:
    """Return a window, with `n_global` first tokens that see and are seen by all (Longformer, 2020)."""
    return window(reach, reach) | prefix(n_global) | prefix(n_global).T


def bigbird(reach: int, n_global: int, n_random: int, seed: int = 0) -> Mask:
    """Return a window, global tokens and random keys per query (BigBird, 2020)."""
    return longformer(reach, n_global) | scattered(n_random, seed)


def sparse_transformer_strided(stride: int) -> Mask:
    """Return the last `stride` tokens and every `stride`-th one before (Sparse Transformer, 2019)."""
    stride = check_integer(stride, "the stride of sparse_transformer_strided", least=1)
    return causal() & (window(stride - 1, 0) | dilated(stride))


def sparse_transformer_fixed(stride: int, summary: int = 1) -> Mask:
    """Return the tokens of the query's block and the last `summary` of earlier blocks (Sparse Transformer, 2019)."""
    stride = check_integer(stride, "the stride of sparse_transformer_fixed", least=1)
    summary = check_integer(summary, "the summary of sparse_transformer_fixed", least=1)
    if summary > stride:
        raise MaskError(f"the summary of sparse_transformer_fixed is {summary}; expected at most its stride, {stride}")
    return causal() & (blocks(stride) | axis(~prefix(stride - summary), 1, grid=(-1, stride)))


def block_causal(size: int) -> Mask:
    """Return attention to the tokens of the query's block and of all earlier blocks."""
    return axis(causal(), 0, grid=(-1, size))


def block_diffusion(length: int, size: int) -> Mask:
    """Return the training mask of block diffusion (2025): `length` noisy tokens, followed by the same tokens clean.

    Noisy tokens see the noisy tokens of their block and the clean tokens of earlier blocks; clean tokens see the clean
    tokens of their own and earlier blocks."""
    check_integer(length, "the length of block_diffusion", least=1)
    check_integer(size, "the size of block_diffusion", least=1)
    if length % size:
        raise MaskError(f"the length of block_diffusion is {length}; expected a multiple of its size, {size}")
    grid = (2, length // size, size)
    noisy_key = axis(prefix(1), 0, grid)
    noisy_query = noisy_key.T
    is_earlier, same_block = axis(causal() & ~window(0, 0), 1, grid), axis(window(0, 0), 1, grid)
    return (
        (noisy_query & noisy_key & same_block)
        | (noisy_query & ~noisy_key & is_earlier)
        | (~noisy_query & ~noisy_key & axis(causal(), 1, grid))
    )


def shared_prefix(n: int, lengths: Sequence[int]) -> Mask:
    """Return causal attention of several continuations of one prefix of n tokens, none of which sees another."""
    sizes = [check_integer(size, "the n of shared_prefix and each of its lengths") for size in (n, *lengths)]
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return causal() & (prefix(n) | documents(ids))


def native_sparse_attention(blocks: Tensor, size: int, reach: int, rows: int = 1) -> Mask:
    """Return causal attention to selected blocks of keys and to the last `reach` ones (native sparse attention, 2025).

    Args:
        blocks: The numbers of key blocks that the model has chosen, (B, H, query blocks, n).
        size: Number of keys per block.
        reach: Number of keys before the query that it sees in any case.
        rows: Number of queries per list."""
    return causal() & (selected(blocks, size, rows) | window(reach, 0))


# -- images and videos -------------------------------------------------------------------------------------------------


def neighborhood(grid: Sequence[int], side: int, tile: Sequence[int] | None = None) -> Mask:
    """Return neighborhood attention (NATTEN, 2022): a window of `side` along each dimension, shifted at the borders.

    With `tile`, the positions are ordered tile by tile (tiled NATTEN)."""
    reach, grid = _reach(side, "neighborhood"), check_sizes(grid, "grid")
    return reduce(and_, [axis(clamped(reach, reach), dim, grid, tile) for dim in range(len(grid))])


def local_windows(grid: Sequence[int], side: int) -> Mask:
    """Return attention within windows of `side` along each dimension that do not overlap (Swin, 2021)."""
    return reduce(and_, [axis(blocks(side), dim, grid) for dim in range(len(check_sizes(grid, "grid")))])


def axial(grid: Sequence[int]) -> Mask:
    """Return attention along the row and the column of the query (axial attention, 2019), in any dimension."""
    same = [axis(window(0, 0), dim, grid) for dim in range(len(check_sizes(grid, "grid")))]
    lines = [reduce(and_, [*same[:dim], *same[dim + 1 :]]) for dim in range(len(grid))] if len(grid) > 1 else same
    return reduce(or_, lines)


def sliding_tile(grid: Sequence[int], side: int, tile: Sequence[int]) -> Mask:
    """Return sliding tile attention (2025): tiles see a window of `side` tiles along each dimension.

    The positions are ordered tile by tile, and windows are shifted at the borders."""
    grid, tile = check_sizes(grid, "grid"), check_sizes(tile, "tile")
    if len(grid) != len(tile) or any(part < 1 or size % part for size, part in zip(grid, tile, strict=False)):
        raise MaskError(f"the tile of sliding_tile is {tile}; expected divisors of the grid {grid}")
    tiles = (*[size // part for size, part in zip(grid, tile, strict=True)], math.prod(tile))
    reach = _reach(side, "sliding_tile")
    return reduce(and_, [axis(clamped(reach, reach), dim, tiles) for dim in range(len(grid))])


def frame_causal(frame_size: int) -> Mask:
    """Return attention of video frames to themselves and earlier frames, each of `frame_size` positions."""
    return block_causal(frame_size)


def flamingo(image_of_token: Tensor, keys_per_image: int) -> Mask:
    """Return cross-attention from text to its last image (Flamingo, 2022).

    Args:
        image_of_token: For each text token the number of the last image before it, (T,) or (B, T); −1 for none.
        keys_per_image: Number of keys per image."""
    image_of_token = integer_tensor(image_of_token, "image_of_token", "flamingo")
    start = image_of_token.clamp(min=0) * check_integer(keys_per_image, "the keys_per_image of flamingo", least=1)
    return intervals(start, start + (image_of_token >= 0) * keys_per_image)


def _reach(side: int, owner: str) -> int:
    """Return how far a window of odd size reaches."""
    side = check_integer(side, f"the side of {owner}", least=1)
    if side % 2 == 0:
        raise MaskError(f"the side of {owner} is {side}; expected an odd number, so that the query is in the middle")
    return side // 2
