"""Numbers that sum up attention weights: how spread they are, how far they reach, what they add to an output.

Each takes plain tensors (H heads, T queries, S keys, D head width, M model width) and works row by row, so that a long
run can be measured a block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._shapes import Float
from clearhead.errors import ShapeError


def check_labels(weights: Tensor, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Refuses weights (…, T, S) where not every query and every key has a name."""
    if tuple(weights.shape[-2:]) != (len(rows), len(columns)):
        raise ShapeError(
            f"weights are {tuple(weights.shape)} and there are {len(rows)} row and {len(columns)} column labels; "
            "expected a label for each"
        )


def check_patches(weights: Tensor, grid: tuple[int, int]) -> None:
    """Refuses weights (…, N) that are not one for each patch of a grid."""
    n, (rows, columns) = weights.shape[-1], grid
    if n != rows * columns:
        raise ShapeError(f"there are {n} weights for {rows}×{columns} patches; leave out tokens that stand for none")


def entropy(weights: Float[Tensor, "*B T S"]) -> Float[Tensor, "*B T"]:
    """How spread each query's weights are, in nats: 0 for one key, log n for n keys alike."""
    return torch.special.entr(weights).sum(-1)


def mean_attention_distance(
    weights: Float[Tensor, "*B T S"], apart: Float[Tensor, "T S"] | None = None
) -> Float[Tensor, "*B T"]:
    """How far from itself each query looks on average. `apart` is the distance of every pair, |i − j| unless given."""
    if apart is None:
        T, S = weights.shape[-2:]
        apart = (torch.arange(T)[:, None] - torch.arange(S)).abs()
    return (weights * apart.to(weights)).sum(-1)


def rollout(layers: Sequence[Float[Tensor, "_ T T"]], *, residual: float = 0.5) -> Float[Tensor, "T T"]:
    """How much of each input position reaches each output position through all layers, first layer first.

    A layer is taken as `residual` of staying in place and the rest of its heads' mean, and the layers are multiplied
    (attention rollout). It follows the weights alone: what values and feed-forward layers do is not in it."""
    if not layers:
        raise ShapeError("rollout got no layer; give the weights of at least one, (H, T, T) each")
    if not 0 <= residual < 1:
        raise ShapeError(f"residual is {residual}; expected a share from 0 up to, and without, 1")
    for number, layer in enumerate(layers):
        if layer.dim() != 3 or layer.shape[1:] != layers[0].shape[1:] or layer.shape[1] != layer.shape[2]:
            raise ShapeError(
                f"layer {number} of the rollout is {tuple(layer.shape)} and the first {tuple(layers[0].shape)}; "
                "expected self-attention of one length, (H, T, T)"
            )
    stays = torch.eye(layers[0].shape[-1]).to(layers[0])
    total = stays
    for layer in layers:
        step = residual * stays + (1 - residual) * layer.mean(0)
        # A query that may attend to nothing has a row of zeros: then all of it stays in place.
        total = step / step.sum(-1, keepdim=True) @ total
    return total


def value_norms(values: Float[Tensor, "K S D"], projection: Float[Tensor, "M HD"]) -> Float[Tensor, "H S"]:
    """‖v_j W_O‖ for each head and key: how long the vector is that a key would add at a weight of 1.

    `projection` is the weight of the output projection, which puts the heads side by side; K divides H."""
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
    """What one key added through one head: its weight, the length of what it added, and its share of all lengths."""

    head: int
    key: int
    weight: float
    length: float
    share: float


def value_weighted_norms(
    weights: Float[Tensor, "H S"], written: Float[Tensor, "H S"], *, top: int = 10
) -> list[ValueWeightedNorm]:
    """The largest contributions to one output, of all heads and keys: weight × ‖v W_O‖, largest first.

    `weights` is one query's row in each head; `written` comes from `lengths_written`. A large weight on a key whose
    value is short adds little: this is what the weights alone do not show."""
    if weights.shape != written.shape:
        raise ShapeError(f"weights are {tuple(weights.shape)} and lengths {tuple(written.shape)}; expected both (H, S)")
    lengths = weights * written
    total = float(lengths.sum()) or 1.0
    found = lengths.flatten().topk(min(top, lengths.numel()))
    places = [divmod(place, weights.shape[1]) for place in found.indices.tolist()]
    return [
        ValueWeightedNorm(head, key, float(weights[head, key]), length, length / total)
        for (head, key), length in zip(places, found.values.tolist(), strict=True)
    ]
