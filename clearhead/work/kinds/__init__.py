"""The kinds of problems, one file each: `KEYS`, the keys its files may have, `solve(source)`, and `vary(source, draw)`,
the values that make it another problem of the same difficulty."""

from __future__ import annotations

from clearhead.work.kinds import (
    attention,
    convolution,
    cost,
    derivation,
    layer_norm,
    mask,
    position,
    receptive_field,
    schedule,
)

KINDS = {
    "attention": attention,
    "layer-norm": layer_norm,
    "position": position,
    "convolution": convolution,
    "schedule": schedule,
    "mask": mask,
    "cost": cost,
    "receptive-field": receptive_field,
    "derivation": derivation,
}
