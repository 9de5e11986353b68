"""Disentangled attention (He et al., 2021): scores of contents with relative positions.

    s[i, j] = (q_i · k_j + q_i · K r_{i−j} + Q r_{i−j} · k_j) · scale

The vectors r of relative positions are learned and shared by all layers. Each layer projects them with its own matrices
of queries and keys, so this bias depends on the content, unlike that of `RelativeBias`.

    B batch   H heads   T queries   S keys   D head width   M model width   P relative positions
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.typed_module import Module
from clearhead._core.validation import PositiveFloat, PositiveInt, require
from clearhead.config import Validated


@runtime_checkable
class Projections(Protocol):
    """The projections of an attention layer."""

    n_heads: int

    @property
    def q_proj(self) -> nn.Module:
        """The projection of queries."""

    @property
    def k_proj(self) -> nn.Module:
        """The projection of keys."""


@dataclass(frozen=True)
class Disentangled(Validated):
    """Learned vectors of relative positions, as in DeBERTa-v2 and v3.

    Distances of up to half of `n_buckets` have a vector each; larger ones share vectors, whose number grows with the
    logarithm of the distance. Use it with `Scaled((3 · d_head) ** -0.5)`, because the score is a sum of three products.

    Beyond the trained length: distances of at least `max_distance` share the last vectors.

    Args:
        n_buckets: Number of vectors per direction.
        max_distance: Distance from which on all distances share a vector.
        eps: Epsilon of the norm of the vectors.
    """

    kind: ClassVar[Literal["content"]] = "content"
    n_buckets: PositiveInt = 256
    max_distance: PositiveInt = 512
    eps: PositiveFloat = 1e-7

    def validate(self) -> None:
        require(
            self.n_buckets > 1 and self.max_distance - 1 > self.n_buckets // 2,
            f"Disentangled: n_buckets is {self.n_buckets} and max_distance {self.max_distance}; expected at least 2 "
            "buckets, of which half are for distances below max_distance",
        )

    def buckets(self, relative: Tensor) -> Tensor:
        """Return the index of the vector of each query-minus-key distance i − j."""
        middle = self.n_buckets // 2
        # float32 and this order of operations decide to which bucket a distance at an edge belongs.
        ratio = torch.log(relative.abs().clamp(min=1).float() / middle)
        steps = torch.ceil(ratio / torch.log(torch.tensor((self.max_distance - 1) / middle)) * (middle - 1))
        far = ((steps + middle) * relative.sign()).long()
        bucket = torch.where(relative.abs() <= middle, relative, far)
        return (bucket + self.n_buckets).clamp(0, 2 * self.n_buckets - 1)

    def build(self, d_model: int) -> DisentangledPositions:
        """Return the module for a model of width `d_model`."""
        return DisentangledPositions(self, d_model)


@dataclass(frozen=True, eq=False)
class ContentBias:
    """A bias of scores that an attention layer computes from its queries and keys.

    Attributes:
        vectors: Vectors of relative positions, (P, M).
        index: Relative position of each query and key, (T, S).
    """

    vectors: Tensor
    index: Tensor

    def scores(self, layer: Projections, q: Float[Tensor, "*B H T D"], k: Float[Tensor, "*B H S D"]) -> Tensor:
        """Return the scores (B, H, T, S) of contents with relative positions, scaled."""
        q_rows, k_rows = (
            projection(self.vectors).unflatten(-1, (layer.n_heads, -1)).transpose(0, 1)  # (H, P, D)
            for projection in (layer.q_proj, layer.k_proj)
        )
        index = self.index.expand(*q.shape[:-2], *self.index.shape)
        from_queries = (q @ k_rows.mT).gather(-1, index)
        from_keys = (k @ q_rows.mT).gather(-1, index.mT).mT
        scores: Tensor = (from_queries + from_keys) / math.sqrt(3 * q.shape[-1])
        return scores


class DisentangledPositions(Module):
    """Module of `Disentangled`; its parameters are `weight` (2 · n_buckets, M) and those of the norm."""

    def __init__(self, choice: Disentangled, d_model: int) -> None:
        super().__init__()
        self.choice = choice
        self.weight = nn.Parameter(torch.empty(2 * choice.n_buckets, d_model))
        self.norm = nn.LayerNorm(d_model, eps=choice.eps)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, T: int, S: int, query_offset: int = 0, device: torch.device | str | None = None) -> ContentBias:
        """Return the bias of T queries from `query_offset` on and keys 0 … S − 1."""
        queries = torch.arange(T, device=self.weight.device) + query_offset
        keys = torch.arange(S, device=self.weight.device)
        return ContentBias(self.norm(self.weight), self.choice.buckets(queries[:, None] - keys))

    def extra_repr(self) -> str:
        return f"{self.choice}, d_model={self.weight.shape[1]}"
