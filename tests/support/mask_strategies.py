"""Random mask expressions and sizes, and the definition of each mask as plain Python over two integers.

`allowed` is the test oracle: it shares no code with the package, only the definitions of the design.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from clearhead.masks import (
    And,
    Blocks,
    Causal,
    Dilated,
    Every,
    Full,
    Mask,
    Not,
    Or,
    Prefix,
    Transposed,
    Window,
    blocks,
    causal,
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
leaves = plain_leaves | st.builds(scattered, positive, st.integers(0, 3))


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


def allowed(mask: Mask, p: int, j: int) -> bool:
    """Return whether p may attend to j, by the definitions of the design."""
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
        case And(parts=parts):
            return all(allowed(part, p, j) for part in parts)
        case Or(parts=parts):
            return any(allowed(part, p, j) for part in parts)
        case Not(parts=parts):
            return not allowed(parts[0], p, j)
        case Transposed(parts=parts):
            return allowed(parts[0], j, p)
    raise AssertionError(f"no definition for {mask}")


def table(mask: Mask, T: int, S: int, query_offset: int) -> torch.Tensor:
    """Return the dense mask (T, S), pair by pair from `allowed`."""
    rows = [[allowed(mask, i + query_offset, j) for j in range(S)] for i in range(T)]
    return torch.tensor(rows, dtype=torch.bool).reshape(T, S)
