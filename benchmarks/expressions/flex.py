"""FlexAttention as the peer of masks on grids and of biases: compiled for each size, as its documentation advises."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

Modification = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A `score_mod`: score, batch, head, query, key."""
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A `mask_mod`: batch, head, query, key."""
MAX_EAGER_LENGTH = 32768


@lru_cache
def compiled() -> tuple[Any, Any]:
    """Return `create_block_mask` and `flex_attention`, compiled once for each size."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    torch._dynamo.config.recompile_limit = 64
    create, attend = (torch.compile(f, dynamic=False) for f in (flex.create_block_mask, flex.flex_attention))
    return create, attend


def create_mask(predicate: Predicate, length: int, device: str) -> Any:
    """Return the block mask of a predicate."""
    return compiled()[0](predicate, None, None, length, length, device=device)


def prepare_mask(predicate: Predicate, length: int, device: str) -> Any:
    """Return the block mask of a predicate, without compilation unless its tensors of all pairs are too large."""
    if length > MAX_EAGER_LENGTH:
        return create_mask(predicate, length, device)
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return flex.create_block_mask(predicate, None, None, length, length, device=device)


def attention_under(block_mask: Any, score_mod: Modification | None = None) -> Callable[..., Tensor]:
    """Return FlexAttention with a prepared block mask."""
    options = {} if score_mod is None else {"score_mod": score_mod}
    return partial(compiled()[1], block_mask=block_mask, **options)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return whether query q sees key k under a causal mask."""
    return q >= k


def neighborhood(grid: tuple[int, ...], side: int) -> Predicate:
    """Return the predicate of neighborhood attention on a grid, with constant sizes."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = q >= 0
        stride = 1
        for size in reversed(grid):
            query, key = q // stride % size, k // stride % size
            start = (query - side // 2).clamp(0, size - side)
            result = result & (key >= start) & (key < start + side)
            stride *= size
        return result

    return visible
