"""What the mask and the position bias of each layer imply for its KV cache.

R rows   S indices per slot   H query heads
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clearhead.generation.engine.program import DecoderProgram
from clearhead.masks import Mask, lookback
from clearhead.masks.regions import Region


class LayerPattern:
    """What a layer's mask and position bias imply for its cache; layers with both in common share it."""

    def __init__(self, mask: Mask, distance_bias: Tensor | None, capacity: int) -> None:
        window = lookback(mask)
        self.mask = mask
        self.distance_bias = distance_bias  # (H, capacity)
        self.capacity = capacity
        self.n_indices = capacity if window is None else min(capacity, window)
        self.is_ring = self.n_indices < capacity
        reachable = Region(0, capacity - 1, 0, capacity - 1, 0, self.n_indices - 1)
        self.hides_keys = mask.classify(reachable) is not True
        self.attends_to_self = mask.classify(Region.nearest(0, capacity - 1, capacity)) is True

    def bias(self, lengths: Tensor, n_indices: int) -> Tensor | None:
        """Return the bias (R, H or 1, indices) of new tokens at positions `lengths` (R,); −∞ hides a key."""
        distance_bias = self.distance_bias
        if not self.hides_keys and distance_bias is None:
            return None
        index = torch.arange(n_indices, device=lengths.device)
        distance = lengths[:, None] - index  # (R, indices)
        distance = distance % self.n_indices if self.is_ring else distance.clamp(min=0)
        bias = None if distance_bias is None else distance_bias[:, distance].transpose(0, 1)  # (R, H, indices)
        if not self.hides_keys:
            return bias
        position = (lengths[:, None] - distance).clamp(min=0) if self.is_ring else index.expand_as(distance)
        allowed = self.mask.allows(lengths[:, None].expand_as(distance), position, keys=self.capacity)
        allowed = allowed.transpose(0, 1) if self.mask.batch_shape else allowed[:, None]  # (R, H or 1, indices)
        bias = torch.zeros(allowed.shape, device=allowed.device) if bias is None else bias
        return bias.masked_fill(~allowed, -math.inf)


def layer_patterns(program: DecoderProgram, capacity: int) -> list[LayerPattern]:
    """Return the pattern of each layer."""
    patterns: dict[tuple[Mask, nn.Module | None], LayerPattern] = {}
    for key in zip(program.masks, program.relative_positions, strict=True):
        if key not in patterns:
            mask, relative = key
            bias = None if relative is None else _distance_bias(relative, program.device, capacity)
            patterns[key] = LayerPattern(mask, bias, capacity)
    return [patterns[key] for key in zip(program.masks, program.relative_positions, strict=True)]


def _distance_bias(relative: nn.Module, device: torch.device, capacity: int) -> Tensor:
    """Return the position bias (H, capacity) of each distance, beginning with 0."""
    bias: Tensor = relative(1, capacity, capacity - 1, device).distance_values(1, capacity, capacity - 1)
    return bias[:, :capacity].float().flip(-1).contiguous()
