"""Random mask expressions and sizes, and the definition of each mask as plain Python over two integers.

`allowed` is the test oracle: it shares no code with the package, only the definitions of the design.
"""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from clearhead.masks import (
    And,
    Axis,
    Blocks,
    Causal,
    Clamped,
    Dilated,
    Every,
    Full,
    Mask,
    Not,
    Or,
    Prefix,
    Transposed,
    Window,
    axis,
    blocks,
    causal,
    clamped,
    dilated,
    every,
    full,
    prefix,
    scattered,
    window,
)

small = st.integers(0, 7)
positive = st.integers(1, 7)

plain_leaves = st.one_of(
    st.just(full()),
    st.just(causal()),
    st.builds(window, small, small),
    st.builds(every, positive, small),
    st.builds(dilated, positive),
    st.builds(prefix, st.integers(0, 20)),
    st.builds(blocks, positive),
)
lines = st.one_of(plain_leaves, st.builds(clamped, small, small))
"""Masks of coordinates."""


@st.composite
def axes(draw):
    """Return masks of one axis of an open grid, which fits any number of positions, in tiles or not."""
    tile = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sizes = [-1, *[side * draw(st.integers(1, 3)) for side in tile[1:]]]
    mask = draw(lines)
    mask = draw(st.sampled_from([mask, mask.T, mask & ~draw(lines)]))
    return axis(mask, draw(st.integers(0, len(sizes) - 1)), sizes, tile=draw(st.sampled_from([tile, None])))


leaves = st.one_of(
    plain_leaves,
    st.builds(scattered, positive, st.integers(0, 3)),
    st.builds(clamped, small, small),
    axes(),
)


def grow(inner):
    """Return a strategy that applies an operator to smaller expressions."""
    return st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
        st.builds(lambda a: a.T, inner),
    )


plain_masks = st.recursive(plain_leaves, grow, max_leaves=8)
masks = st.recursive(leaves, grow, max_leaves=8)
sizes = st.tuples(st.integers(0, 17), st.integers(0, 19), st.integers(0, 23))


def coordinates(sizes: tuple[int, ...], tile: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Return the coordinates of a position, by counting through the grid: the last coordinate changes first."""
    tile = tile or (1,) * len(sizes)
    outer = [math.inf if size == -1 else size // side for size, side in zip(sizes, tile, strict=True)]
    wheels = [*outer, *tile]
    counter = [0] * len(wheels)
    for _ in range(position):
        wheel = len(wheels) - 1
        while counter[wheel] + 1 == wheels[wheel] and wheel > 0:
            counter[wheel] = 0
            wheel -= 1
        counter[wheel] += 1
    return tuple(a * side + b for a, side, b in zip(counter[: len(sizes)], tile, counter[len(sizes) :], strict=True))


def allowed(mask: Mask, p: int, j: int, keys: int = 0) -> bool:
    """Return whether p may attend to j of `keys` keys, by the definitions of the design."""
    match mask:
        case Full():
            return True
        case Causal():
            return j <= p
        case Window(before=before, after=after):
            return j in range(p - before, p + after + 1)
        case Every(step=step, start=start):
            return j in range(start, 10**6, step)
        case Dilated(step=step):
            return abs(p - j) % step == 0
        case Prefix(n=n):
            return j in range(n)
        case Blocks(size=size):
            return any(p in range(s, s + size) and j in range(s, s + size) for s in range(0, 100, size))
        case Clamped(before=before, after=after):
            window = list(range(p - before, p + after + 1))[:keys]
            while window and window[0] < 0:
                window = [x + 1 for x in window]
            while window and window[-1] >= keys:
                window = [x - 1 for x in window]
            return j in window
        case Axis(mask=inner, dim=dim, grid=grid):
            n = grid.sizes[dim]
            if n == -1:
                rows = coordinates(grid.sizes, grid.tile, max(keys - 1, 0))[0] + 1
                n = -(-rows // (grid.tile or (1,))[0]) * (grid.tile or (1,))[0] if keys else 0
            return allowed(inner, *[coordinates(grid.sizes, grid.tile, x)[dim] for x in (p, j)], n)
        case And(parts=parts):
            return all(allowed(part, p, j, keys) for part in parts)
        case Or(parts=parts):
            return any(allowed(part, p, j, keys) for part in parts)
        case Not(parts=parts):
            return not allowed(parts[0], p, j, keys)
        case Transposed(parts=parts):
            return allowed(parts[0], j, p, keys)
    raise AssertionError(f"no definition for {mask}")


def table(mask: Mask, T: int, S: int, query_offset: int) -> torch.Tensor:
    """Return the dense mask (T, S), pair by pair from `allowed`."""
    rows = [[allowed(mask, i + query_offset, j, S) for j in range(S)] for i in range(T)]
    return torch.tensor(rows, dtype=torch.bool).reshape(T, S)
