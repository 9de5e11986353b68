"""How attention is computed: scores, weights, the one entry `attend`, multi-head attention and its cache."""

from __future__ import annotations

from clearhead.attention.attend import attend
from clearhead.attention.normalizers import Gumbel, Hard, Softmax, StraightThrough
from clearhead.attention.scores import Additive, Bilinear, Capped, Dot, Scaled, ScaledDot

__all__ = [
    "Additive",
    "Bilinear",
    "Capped",
    "Dot",
    "Gumbel",
    "Hard",
    "Scaled",
    "ScaledDot",
    "Softmax",
    "StraightThrough",
    "attend",
]
