"""Score functions: the match of a query and a key, before the softmax.

A score function is called with q (..., H, T, D) and k (..., H, S, D) and returns scores (..., H, T, S). `Dot`,
`ScaledDot`, `Scaled` and `SoftCapped` have no parameters; `Bilinear` (multiplicative attention) and `Additive` are
modules. If a score is a dot product of the keys with transformed queries, `as_dot` returns these queries, and the
implementations "sdpa" and "sparse" can run it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.validation import FiniteFloat, PositiveFloat, check_int
from clearhead.config import Validated
from clearhead.errors import ShapeError


@runtime_checkable
class Scores(Protocol):
    """A score function."""

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (..., H, T, S)."""
        ...

    def as_dot(self, q: Tensor) -> tuple[Tensor, float] | None:
        """Return (q', c) such that the score is c · q'ᵀk, or None if it is not a dot product."""
        ...


@dataclass(frozen=True)
class Dot:
    """score(q, k) = qᵀk."""

    def __call__(self, q: Float[Tensor, "*B T D"], k: Float[Tensor, "*B S D"]) -> Float[Tensor, "*B T S"]:
        return q @ k.mT

    def as_dot(self, q: Tensor) -> tuple[Tensor, float]:
        """Return the unchanged queries and the scale 1."""
        return q, 1.0


@dataclass(frozen=True)
class ScaledDot:
    """score(q, k) = qᵀk / √D, so that independent entries of unit variance give scores of unit variance."""

    def __call__(self, q: Float[Tensor, "*B T D"], k: Float[Tensor, "*B S D"]) -> Float[Tensor, "*B T S"]:
        return (q * _inverse_root(q.shape[-1])) @ k.mT

    def as_dot(self, q: Tensor) -> tuple[Tensor, float]:
        """Return the unchanged queries and the scale 1/√D."""
        return q, _inverse_root(q.shape[-1])


@dataclass(frozen=True)
class Scaled(Validated):
    """score(q, k) = scale · qᵀk.

    Args:
        scale: Factor of the dot product.
    """

    scale: FiniteFloat

    def __call__(self, q: Float[Tensor, "*B T D"], k: Float[Tensor, "*B S D"]) -> Float[Tensor, "*B T S"]:
        return (q * self.scale) @ k.mT

    def as_dot(self, q: Tensor) -> tuple[Tensor, float]:
        """Return the unchanged queries and `scale`."""
        return q, self.scale


@dataclass(frozen=True)
class SoftCapped(Validated):
    """score(q, k) = cap · tanh(scale · qᵀk / cap), which limits scores to ±cap, as in Gemma 2.

    It is not a dot product, so "sdpa" does not run it; the kernels of "sparse" apply the cap to each tile of scores.

    Args:
        cap: Limit of the absolute score.
        scale: Scale of the dot product. Default: 1 / √D.
    """

    cap: PositiveFloat
    scale: PositiveFloat | None = None

    def __call__(self, q: Float[Tensor, "*B T D"], k: Float[Tensor, "*B S D"]) -> Float[Tensor, "*B T S"]:
        return self.cap * torch.tanh((q * (self.scale_for(q) / self.cap)) @ k.mT)

    def as_dot(self, q: Tensor) -> None:
        """Return None, because the cap is applied after the product."""
        return None

    def scale_for(self, q: Tensor) -> float:
        """Return the scale of the dot product with these queries."""
        return _inverse_root(q.shape[-1]) if self.scale is None else self.scale


DotScores: TypeAlias = ScaledDot | Dot | Scaled | SoftCapped
"""Score functions without parameters, which configurations can store."""


class Bilinear(nn.Module):
    """score(q, k) = qᵀWk, multiplicative attention; queries and keys may have different widths.

    In half precision the reference runs it, with all (..., T, S) scores in memory, because qᵀW needs float32. W is
    initialized Xavier-uniform.

    Args:
        d_query: Width of the queries.
        d_key: Width of the keys.
        n_heads: Number of matrices: one per head, or 1 for all heads.
    """

    def __init__(self, d_query: int, d_key: int, n_heads: int = 1) -> None:
        super().__init__()
        for name, size in {"d_query": d_query, "d_key": d_key, "n_heads": n_heads}.items():
            check_int(size, f"Bilinear: {name}", minimum=1)
        self.weight = nn.Parameter(torch.empty(n_heads, d_query, d_key))
        _xavier_per_head(self.weight)

    def forward(self, q: Float[Tensor, "*B T Dq"], k: Float[Tensor, "*B S Dk"]) -> Float[Tensor, "*B T S"]:
        """Return the scores (…, T, S) of queries (…, T, Dq) and keys (…, S, Dk)."""
        projected, _ = self.as_dot(q)
        _expect_width("keys", k, self.weight.shape[2])
        return projected @ k.mT

    def as_dot(self, q: Tensor) -> tuple[Tensor, float]:
        """Return the queries (B, H, T, D) times W, and the scale 1."""
        _expect_heads(q, self.weight.shape[0])
        _expect_width("queries", q, self.weight.shape[1])
        return q @ self.weight.to(q.dtype), 1.0

    def extra_repr(self) -> str:
        n_heads, d_query, d_key = self.weight.shape
        return f"{d_query}, {d_key}, n_heads={n_heads}"


class Additive(nn.Module):
    """score(q, k) = uᵀ tanh(W q + U k), additive attention: a network with one hidden layer of width A.

    It allocates (..., H, T, S, A), which is A times the memory of the scores.

    Args:
        d_query: Width of the queries.
        d_key: Width of the keys.
        d_hidden: Hidden width A.
        n_heads: Number of networks: one per head, or 1 for all heads.
    """

    def __init__(self, d_query: int, d_key: int, d_hidden: int, n_heads: int = 1) -> None:
        super().__init__()
        for name, size in {"d_query": d_query, "d_key": d_key, "d_hidden": d_hidden, "n_heads": n_heads}.items():
            check_int(size, f"Additive: {name}", minimum=1)
        self.query_weight = nn.Parameter(torch.empty(n_heads, d_query, d_hidden))  # W
        self.key_weight = nn.Parameter(torch.empty(n_heads, d_key, d_hidden))  # U
        self.out_weight = nn.Parameter(torch.empty(n_heads, d_hidden, 1))  # u
        for weight in self.parameters():
            _xavier_per_head(weight)

    def forward(self, q: Float[Tensor, "*B T Dq"], k: Float[Tensor, "*B S Dk"]) -> Float[Tensor, "*B T S"]:
        """Return the scores (…, T, S) of queries (…, T, Dq) and keys (…, S, Dk)."""
        n_heads, d_query, _ = self.query_weight.shape
        _expect_heads(q, n_heads)
        _expect_width("queries", q, d_query)
        _expect_width("keys", k, self.key_weight.shape[1])
        from_query = (q @ self.query_weight.to(q.dtype)).unsqueeze(-2)  # (..., H, T, 1, A)
        from_key = (k @ self.key_weight.to(k.dtype)).unsqueeze(-3)  # (..., H, 1, S, A)
        hidden = torch.tanh(from_query + from_key)  # (..., H, T, S, A)
        return (hidden @ self.out_weight.to(q.dtype).unsqueeze(-3)).squeeze(-1)

    def as_dot(self, q: Tensor) -> None:
        """Return None, because the tanh of a sum is not a dot product."""
        return None

    def extra_repr(self) -> str:
        n_heads, d_query, d_hidden = self.query_weight.shape
        return f"{d_query}, {self.key_weight.shape[1]}, {d_hidden}, n_heads={n_heads}"


def _inverse_root(width: int) -> float:
    """Return 1 / √width."""
    return 1.0 / math.sqrt(width) if width else 1.0


def _xavier_per_head(weight: Tensor) -> None:
    """Initialize (n_heads, in, out) as separate matrices per head."""
    bound = math.sqrt(6.0 / (weight.shape[1] + weight.shape[2]))
    nn.init.uniform_(weight, -bound, bound)


def _expect_width(name: str, x: Tensor, width: int) -> None:
    """Raise ShapeError unless `x` has this width."""
    if x.shape[-1] != width:
        raise ShapeError(f"{name} have width {x.shape[-1]}; this score function expects {width}")


def _expect_heads(q: Tensor, n_heads: int) -> None:
    """Raise ShapeError unless the parameters fit the number of heads."""
    if n_heads != 1 and q.shape[-3] != n_heads:
        raise ShapeError(
            f"got {q.shape[-3]} heads; this score function has parameters for {n_heads}: create it with "
            f"n_heads={q.shape[-3]}, or with n_heads=1 to share them"
        )
