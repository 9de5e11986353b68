"""Attention: `attend`, score functions and normalizers."""

from __future__ import annotations

from clearhead.attention.attend import attend
from clearhead.attention.normalizers import GumbelSoftmax, HardMax, Softmax, StraightThrough
from clearhead.attention.scores import Additive, Bilinear, Dot, Scaled, ScaledDot, SoftCapped
from clearhead.attention.sinks import SinkSoftmax

__all__ = [
    "Additive",
    "Bilinear",
    "Dot",
    "GumbelSoftmax",
    "HardMax",
    "Scaled",
    "ScaledDot",
    "SinkSoftmax",
    "SoftCapped",
    "Softmax",
    "StraightThrough",
    "attend",
]
