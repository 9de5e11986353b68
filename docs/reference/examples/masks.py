import torch
from clearhead import masks
from clearhead.masks import (
    allow,
    axis,
    blocks,
    causal,
    clamped,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    prefix,
    scattered,
    window,
)


(causal() & (window(3, 0) | every(4))).count(16)  # → 82

print(window(2, 2).draw(8))  # a Drawing

full().density(5)  # → 1.0

masks.parse("causal() & ~dilated(2)") == causal() & ~dilated(2)  # → True

padding(torch.tensor([3, 5])).dense(5).shape  # → torch.Size([2, 1, 5, 5])

documents(torch.tensor([[0, 0, 1, 1, 1]])).count(5)  # → 13

(prefix(2) | causal()).count(4)  # → 11

blocks(2).count(4)  # → 8

# Neighborhood attention on an image of 8 × 8 patches: each sees a square of 3 × 3.
(axis(clamped(1, 1), 0, grid=(8, 8)) & axis(clamped(1, 1), 1, grid=(8, 8))).count(64)  # → 576

scattered(per_row=2, seed=7).count(10)  # → 20

# Text that attends to the image before it: the keys of its last image.
masks.intervals(start=[0, 0, 4, 4], stop=[4, 4, 8, 8]).count(4, 8)  # → 16

# The key blocks that a model has chosen for each block of 4 queries.
masks.selected(torch.tensor([[0, 1], [0, 3]]), size=4).count(8, 16)  # → 64

masks.per_head(causal(), window(1, 1)).dense(4).shape  # → torch.Size([2, 4, 4])

allow(torch.eye(3, dtype=torch.bool)).count(3)  # → 3

forbid(torch.eye(3, dtype=torch.bool)).count(3)  # → 6

masks.as_mask(None) == full()  # → True

masks.draw(causal(), 4, 4)

print(masks.draw_on_grid(axis(clamped(1, 1), 0, (4, 6)) & axis(clamped(1, 1), 1, (4, 6)), 8))  # a GridDrawing

isinstance(masks.draw_on_grid(axis(causal(), 0, (4, 4))), masks.GridDrawing)  # → True

masks.fold(causal() | full(), leaf=lambda atom: 1, and_=min, or_=max, not_=lambda x: -x)  # → 1

[atom.leaf for atom in masks.leaves(causal() & window(1, 1))]  # → [causal(), window(1, 1)]

# The classes behind the functions: what a mask is made of, for code that looks into one.
kinds = (masks.Mask, masks.Leaf, masks.Atom, masks.And, masks.Or, masks.Not, masks.Transposed)
isinstance(causal() & full().T, masks.Mask)  # → True

(masks.Full(), masks.Causal(), masks.Window(1, 1), masks.Every(2, 0), masks.Dilated(2), masks.Prefix(2), masks.Blocks(2))

(masks.Clamped(1, 1), axis(causal(), 0, (-1, 4)).grid == masks.Grid((-1, 4)))  # → (clamped(1, 1), True)

isinstance(axis(causal(), 0, (-1, 4)), masks.Axis)  # → True

(masks.Head(0, 2, 4), masks.PerHead, masks.Intervals, masks.Selected)

(masks.Scattered, masks.Padding, masks.Documents, masks.Allow, masks.Forbid)

masks.lookback(causal() & window(3, 0))  # → 4

# A `mask_mod` of FlexAttention, of batch, head, query and key indices.
masks.from_function(lambda b, h, q, k: (q >= k) & (q - k < 4), 16)  # → causal() & window(3, 0)
