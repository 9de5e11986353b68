"""Measures of attention weights: entropy, distance, rollout and value-weighted norms.

All take plain tensors (H heads, T queries, S keys, D head width, M model width) and work row by row, so that a long run
can be measured in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead.errors import ShapeError


def check_labels(weights: Tensor, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Raise ShapeError unless weights (…, T, S) have a label for every query and key."""
    if tuple(weights.shape[-2:]) != (len(rows), len(columns)):
        raise ShapeError(
            f"weights are {tuple(weights.shape)} and there are {len(rows)} row and {len(columns)} column labels; "
            "expected one label per row and column"
        )


def check_patches(weights: Tensor, grid: tuple[int, int]) -> None:
    """Raise ShapeError unless weights (…, N) have one entry per patch."""
    n, (rows, columns) = weights.shape[-1], grid
    if n != rows * columns:
        raise ShapeError(f"there are {n} weights for {rows}×{columns} patches; omit the other tokens")


def entropy(weights: Float[Tensor, "*B T S"]) -> Float[Tensor, "*B T"]:
    """Return the entropy of each query's weights in nats: 0 for one key, log n for n equal weights.

    Args:
        weights: Attention weights; the last dimension is the keys.
    """
    return torch.special.entr(weights).sum(-1)


def mean_attention_distance(
    weights: Float[Tensor, "*B T S"], distances: Float[Tensor, "T S"] | None = None
) -> Float[Tensor, "*B T"]:
    """Return the mean distance of each query to its keys.

    Args:
        weights: Attention weights; the last dimension is the keys.
        distances: Distance of every query and key; |i − j| by default.
    """
    if distances is None:
        T, S = weights.shape[-2:]
        distances = (torch.arange(T)[:, None] - torch.arange(S)).abs()
    return (weights * distances.to(weights)).sum(-1)


def rollout(layers: Sequence[Float[Tensor, "_ T T"]], *, residual: float = 0.5) -> Float[Tensor, "T T"]:
    """Return the attention rollout: how much of each input position reaches each output position through all layers.

    Each layer is modeled as `residual` · identity + (1 − `residual`) · mean over heads, and the layers are multiplied.
    Values and feed-forward layers are not taken into account.

    Args:
        layers: Weights of each layer, (H, T, T), first layer first.
        residual: Share of the residual connection, in [0, 1).
    """
    if not layers:
        raise ShapeError("rollout got no layer; pass the weights of at least one, (H, T, T) each")
    if not 0 <= residual < 1:
        raise ShapeError(f"residual is {residual}; expected a number in [0, 1)")
    for number, layer in enumerate(layers):
        if layer.dim() != 3 or layer.shape[1:] != layers[0].shape[1:] or layer.shape[1] != layer.shape[2]:
            raise ShapeError(
                f"layer {number} of the rollout is {tuple(layer.shape)} and the first {tuple(layers[0].shape)}; "
                "expected self-attention of one length, (H, T, T)"
            )
    identity = torch.eye(layers[0].shape[-1]).to(layers[0])
    total = identity
    for layer in layers:
        step = residual * identity + (1 - residual) * layer.mean(0)
        sums = step.sum(-1, keepdim=True)
        # A fully masked query has a row of zeros, so only the residual connection remains.
        total = torch.where(sums > 0, step / sums, identity) @ total
    return total


def value_norms(values: Float[Tensor, "K S D"], projection: Float[Tensor, "M HD"]) -> Float[Tensor, "H S"]:
    """Return ‖v_j W_O‖ for each head and key: the norm of the vector that the key would add at a weight of 1.

    `projection` is the weight of the output projection, whose input is the concatenation of the heads; K divides H.
    """
    D = values.shape[-1]
    if projection.shape[1] % D or (projection.shape[1] // D) % values.shape[0]:
        raise ShapeError(
            f"values are {tuple(values.shape)} and the output projection {tuple(projection.shape)}; expected (K, S, D) "
            "and (M, H·D) with H a multiple of K"
        )
    heads = projection.unflatten(1, (-1, D))  # (M, H, D)
    values = values.repeat_interleave(heads.shape[1] // values.shape[0], dim=0)  # (H, S, D)
    return torch.einsum("mhd,hsd->hsm", heads, values).norm(dim=-1)


@dataclass(frozen=True)
class ValueWeightedNorm:
    """Contribution of one key through one head.

    Args:
        head: Index of the head.
        key: Position of the key.
        weight: Attention weight of the key.
        norm: Norm of the vector that the key adds to the output.
        share: Share of this norm in those of all keys and heads.
    """

    head: int
    key: int
    weight: float
    norm: float
    share: float


def value_weighted_norms(
    weights: Float[Tensor, "H S"], norms: Float[Tensor, "H S"], *, top: int = 10
) -> list[ValueWeightedNorm]:
    """Return the largest contributions to one output over all heads and keys: weight × ‖v W_O‖, in descending order.

    A large weight on a key whose value is small contributes little, which the weights alone do not show.

    Args:
        weights: The weights of one query in each head, (H, S).
        norms: The result of `value_norms`, (H, S).
        top: Number of contributions.
    """
    if weights.shape != norms.shape:
        raise ShapeError(f"weights are {tuple(weights.shape)} and norms {tuple(norms.shape)}; expected both (H, S)")
    weighted = weights * norms
    total = float(weighted.sum()) or 1.0
    largest = weighted.flatten().topk(min(top, weighted.numel()))
    positions = [divmod(place, weights.shape[1]) for place in largest.indices.tolist()]
    return [
        ValueWeightedNorm(head, key, float(weights[head, key]), norm, norm / total)
        for (head, key), norm in zip(positions, largest.values.tolist(), strict=True)
    ]
