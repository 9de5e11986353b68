"""How attention is computed: scores, weights, the one entry `attend`, multi-head attention and its cache."""

from __future__ import annotations

from clearhead.attention.attend import attend
from clearhead.attention.normalizers import GumbelSoftmax, HardMax, Softmax, StraightThrough
from clearhead.attention.scores import Additive, Bilinear, Dot, Scaled, ScaledDot, SoftCapped

__all__ = [
    "Additive",
    "Bilinear",
    "Dot",
    "GumbelSoftmax",
    "HardMax",
    "Scaled",
    "ScaledDot",
    "SoftCapped",
    "Softmax",
    "StraightThrough",
    "attend",
]
