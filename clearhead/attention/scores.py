"""How alike a query and a key are: the number before the softmax.

A score function is called with q (..., H, T, D) and k (..., H, S, D) and returns scores (..., H, T, S). `Dot` and
`ScaledDot` are plain values; `Bilinear` (multiplicative attention) and `Additive` carry parameters and are modules. A
function that is a dot product after a change of the query says so with `as_dot`: that is what lets it run fused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.validation import PositiveFloat, check_int
from clearhead.config import Validated
from clearhead.errors import ShapeError


@runtime_checkable
class Scores(Protocol):
    """What `attend` asks of a score function."""

    def __call__(self, q: Tensor, k: Tensor) -> Tensor: ...

    def as_dot(self, q: Tensor) -> tuple[Tensor, float] | None:
        """(q', c) such that the score is c · q'ᵀk, or None where it is no dot product."""
        ...


@dataclass(frozen=True)
class Dot:
    """score(q, k) = qᵀk."""

    def __call__(self, q: Float[Tensor, "*B T D"], k: Float[Tensor, "*B S D"]) -> Float[Tensor, "*B T S"]:
        return q @ k.mT

    def as_dot(self, q: Tensor) -> tuple[Tensor, float]:
        """The queries as they are, and the scale 1."""
        return q, 1.0


@dataclass(frozen=True)
class ScaledDot:
    """score(q, k) = qᵀk / √D, so that independent entries of unit variance give scores of unit variance."""

    def __call__(self, q: Float[Tensor, "*B T D"], k: Float[Tensor, "*B S D"]) -> Float[Tensor, "*B T S"]:
        return (q * _inverse_root(q.shape[-1])) @ k.mT

    def as_dot(self, q: Tensor) -> tuple[Tensor, float]:
        """The queries as they are, and the scale 1/√D."""
        return q, _inverse_root(q.shape[-1])


@dataclass(frozen=True)
class Scaled(Validated):
    """score(q, k) = scale · qᵀk, with a scale of one's own."""

    scale: float

    def __call__(self, q: Float[Tensor, "*B T D"], k: Float[Tensor, "*B S D"]) -> Float[Tensor, "*B T S"]:
        return (q * self.scale) @ k.mT

    def as_dot(self, q: Tensor) -> tuple[Tensor, float]:
        """The queries as they are, and the scale that was given."""
        return q, self.scale


@dataclass(frozen=True)
class SoftCapped(Validated):
    """score(q, k) = cap · tanh(scale · qᵀk / cap), so that no score is beyond ±cap, as in Gemma 2.

    `scale=None` is 1 / √D. It is no dot product, so all (..., T, S) scores are in memory."""

    cap: PositiveFloat
    scale: PositiveFloat | None = None

    def __call__(self, q: Float[Tensor, "*B T D"], k: Float[Tensor, "*B S D"]) -> Float[Tensor, "*B T S"]:
        scale = _inverse_root(q.shape[-1]) if self.scale is None else self.scale
        return self.cap * torch.tanh((q * (scale / self.cap)) @ k.mT)

    def as_dot(self, q: Tensor) -> None:
        """None: the cap comes after the product, so only the reference computes it."""
        return None


DotScores: TypeAlias = ScaledDot | Dot | Scaled | SoftCapped
"""The score functions without parameters, which a configuration can name."""


class Bilinear(nn.Module):
    """score(q, k) = qᵀWk, multiplicative attention: queries and keys may have different widths.

    One W for all heads, or one for each with `n_heads`. W starts as Xavier-uniform. qᵀW is kept in float32 or wider, so
    that half precision is computed by the reference, with all (..., T, S) scores in memory."""

    def __init__(self, d_query: int, d_key: int, n_heads: int = 1) -> None:
        super().__init__()
        for name, size in {"d_query": d_query, "d_key": d_key, "n_heads": n_heads}.items():
            check_int(size, f"Bilinear: {name}", minimum=1)
        self.weight = nn.Parameter(torch.empty(n_heads, d_query, d_key))
        _xavier_per_head(self.weight)

    def forward(self, q: Float[Tensor, "*B T Dq"], k: Float[Tensor, "*B S Dk"]) -> Float[Tensor, "*B T S"]:
        """Scores (…, T, S) of queries (…, T, Dq) against keys (…, S, Dk), through the matrix."""
        projected, _ = self.as_dot(q)
        _expect_width("keys", k, self.weight.shape[2])
        return projected @ k.mT

    def as_dot(self, q: Tensor) -> tuple[Tensor, float]:
        """Queries (B, H, T, D) times the matrix, which makes it a dot product, and the scale 1."""
        _expect_heads(q, self.weight.shape[0])
        _expect_width("queries", q, self.weight.shape[1])
        return q @ self.weight.to(q.dtype), 1.0

    def extra_repr(self) -> str:
        n_heads, d_query, d_key = self.weight.shape
        return f"{d_query}, {d_key}, n_heads={n_heads}"


class Additive(nn.Module):
    """score(q, k) = uᵀ tanh(W q + U k): a one-layer network compares the two.

    It builds (..., H, T, S, A) for hidden width A: A times the memory of the scores, and no matrix product to speak of.
    One network for all heads, or one for each with `n_heads`."""

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
        """Scores (…, T, S) of queries (…, T, Dq) against keys (…, S, Dk), of each pair by the network."""
        n_heads, d_query, _ = self.query_weight.shape
        _expect_heads(q, n_heads)
        _expect_width("queries", q, d_query)
        _expect_width("keys", k, self.key_weight.shape[1])
        from_query = (q @ self.query_weight.to(q.dtype)).unsqueeze(-2)  # (..., H, T, 1, A)
        from_key = (k @ self.key_weight.to(k.dtype)).unsqueeze(-3)  # (..., H, 1, S, A)
        hidden = torch.tanh(from_query + from_key)  # (..., H, T, S, A)
        return (hidden @ self.out_weight.to(q.dtype).unsqueeze(-3)).squeeze(-1)

    def as_dot(self, q: Tensor) -> None:
        """None: a sum inside a tanh is no dot product, so only the reference computes it."""
        return None

    def extra_repr(self) -> str:
        n_heads, d_query, d_hidden = self.query_weight.shape
        return f"{d_query}, {self.key_weight.shape[1]}, {d_hidden}, n_heads={n_heads}"


def _inverse_root(width: int) -> float:
    return 1.0 / math.sqrt(width) if width else 1.0


def _xavier_per_head(weight: Tensor) -> None:
    # Fans are those of one head: (n_heads, in, out) is n_heads separate maps, not one.
    bound = math.sqrt(6.0 / (weight.shape[1] + weight.shape[2]))
    nn.init.uniform_(weight, -bound, bound)


def _expect_width(what: str, x: Tensor, width: int) -> None:
    if x.shape[-1] != width:
        raise ShapeError(f"{what} are {x.shape[-1]} wide and this score function was made for {width}")


def _expect_heads(q: Tensor, n_heads: int) -> None:
    if n_heads != 1 and q.shape[-3] != n_heads:
        got, advice = q.shape[-3], f"make it with n_heads={q.shape[-3]}, or with n_heads=1 to share one set"
        raise ShapeError(f"got {got} heads and this score function has weights for {n_heads}; {advice}")
