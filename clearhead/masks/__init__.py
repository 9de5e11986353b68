"""Attention masks as expressions.

    from clearhead.masks import causal, every, window

    m = causal() & (window(256, 0) | every(64))
    m.count(1_000_000)   # exact, without a million × million tensor
    print(m.draw(16))

True means may attend; rows are queries and columns are keys. `parse` reads the same notation from text."""

from __future__ import annotations

from clearhead.masks import catalogue
from clearhead.masks.base import Leaf, Mask, as_mask
from clearhead.masks.data import Allow, Documents, Forbid, Padding, allow, documents, forbid, padding
from clearhead.masks.drawing import Drawing, draw
from clearhead.masks.function import from_function
from clearhead.masks.grid_drawing import GridDrawing, draw_on_grid
from clearhead.masks.grids import Axis, Clamped, Grid, axis, clamped
from clearhead.masks.heads import Head
from clearhead.masks.operators import And, Atom, Not, Or, PerHead, Transposed, fold, leaves, lookback, per_head
from clearhead.masks.parse import parse
from clearhead.masks.selection import Intervals, Selected, intervals, selected
from clearhead.masks.structural import (
    Blocks,
    Causal,
    Dilated,
    Every,
    Full,
    Prefix,
    Scattered,
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

__all__ = [
    "Allow",
    "And",
    "Atom",
    "Axis",
    "Blocks",
    "Causal",
    "Clamped",
    "Dilated",
    "Documents",
    "Drawing",
    "Every",
    "Forbid",
    "Full",
    "Grid",
    "GridDrawing",
    "Head",
    "Intervals",
    "Leaf",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "PerHead",
    "Prefix",
    "Scattered",
    "Selected",
    "Transposed",
    "Window",
    "allow",
    "as_mask",
    "axis",
    "blocks",
    "catalogue",
    "causal",
    "clamped",
    "dilated",
    "documents",
    "draw",
    "draw_on_grid",
    "every",
    "fold",
    "forbid",
    "from_function",
    "full",
    "intervals",
    "leaves",
    "lookback",
    "padding",
    "parse",
    "per_head",
    "prefix",
    "scattered",
    "selected",
    "window",
]
