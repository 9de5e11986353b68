"""Attention: `attend`, score functions and normalizers."""

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
