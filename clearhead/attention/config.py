"""The sizes of an attention layer, and what they must be to each other: said once, for layers, blocks and models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clearhead.attention.scores import DotScores, ScaledDot
from clearhead.config import Config, Value
from clearhead.values import Count, require


@dataclass(frozen=True, kw_only=True)
class Biases(Value):
    """Which linear maps of a block add a bias: those to queries, keys and values, the one back, the feed-forward's."""

    q: bool = True
    k: bool = True
    v: bool = True
    out: bool = True
    ff: bool = True

    @classmethod
    def of(cls, bias: bool | Biases) -> Biases:
        """What a field `bias` says: True is all of them, False none."""
        return bias if isinstance(bias, Biases) else cls(q=bias, k=bias, v=bias, out=bias, ff=bias)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """What `MultiHeadAttention` is made of. Blocks and Transformers are configured by these fields and more."""

    called: ClassVar[str] = "MultiHeadAttention"  # whose arguments they are

    d_model: Count
    n_heads: Count
    n_kv_heads: Count | None = None  # fewer than n_heads: grouped-query attention; None: as many
    d_head: Count | None = None  # None: d_model / n_heads
    bias: bool | Biases = True  # of every linear map, or of some
    scores: DotScores = ScaledDot()  # how alike a query and a key are

    @property
    def biases(self) -> Biases:
        """Which linear maps add one."""
        return Biases.of(self.bias)

    @property
    def head_width(self) -> int:
        """D: `d_head`, or its default."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def kv_heads(self) -> int:
        """K: `n_kv_heads`, or its default."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def validate(self) -> None:
        require(
            self.d_head is not None or self.d_model % self.n_heads == 0,
            f"{self.owner}: d_model is {self.d_model} and n_heads is {self.n_heads}; expected a width that the heads "
            "divide: change one of them, or give d_head",
        )
        require(
            self.n_heads % self.kv_heads == 0,
            f"{self.owner}: n_heads is {self.n_heads} and n_kv_heads is {self.n_kv_heads}; expected a multiple of "
            "n_kv_heads, so that each key head serves equally many query heads",
        )
