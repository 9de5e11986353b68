"""What may attend to what: masks as expressions.

    from clearhead.masks import causal, every, window

    m = causal() & (window(256, 0) | every(64))
    m.count(1_000_000)   # exact, without a million × million tensor
    print(m.draw(16))

True means may attend; rows are queries and columns are keys. `parse` reads the same notation from text."""

from __future__ import annotations

from clearhead.masks.base import Leaf, Mask, as_mask
from clearhead.masks.data import Allow, Block, Documents, Padding, allow, block, documents, padding
from clearhead.masks.drawing import Drawing, draw
from clearhead.masks.operators import And, Atom, Not, Or, Transposed, fold, leaves, reach
from clearhead.masks.parse import parse
from clearhead.masks.structural import (
    Blocks,
    Causal,
    Every,
    Full,
    Prefix,
    Scattered,
    Stride,
    Window,
    blocks,
    causal,
    every,
    full,
    prefix,
    scattered,
    stride,
    window,
)

__all__ = [
    "Allow", "And", "Atom", "Block", "Blocks", "Causal", "Documents", "Drawing", "Every", "Full", "Leaf", "Mask", "Not",
    "Or", "Padding", "Prefix", "Scattered", "Stride", "Transposed", "Window", "allow", "as_mask", "block", "blocks",
    "causal", "documents", "draw", "every", "fold", "full", "leaves", "padding", "parse", "prefix", "reach",
    "scattered", "stride", "window",
]  # fmt: skip
