"""Biases of attention scores as expressions.

    from clearhead.attention.biases import alibi, distance, logarithm

    attend(q, k, v, causal(), bias=alibi(8) + distance(logarithm(-0.5)))

A bias depends on the head and on the distance from query to key. Attention computes it inside its kernels, so that it
takes memory for T + S values per head instead of T × S. `parse` reads the same notation from text."""

from __future__ import annotations

from clearhead.attention.biases.base import Bias, Sum, TensorBias
from clearhead.attention.biases.buckets import Buckets, buckets
from clearhead.attention.biases.drawing import BiasDrawing
from clearhead.attention.biases.expressions import Alibi, Distance, Relative, Tabulated, alibi, distance, relative
from clearhead.attention.biases.functions import (
    Clipped,
    DistanceFunction,
    Gaussian,
    Linear,
    Logarithm,
    Power,
    clipped,
    gaussian,
    linear,
    logarithm,
    power,
)
from clearhead.attention.biases.parse import parse

__all__ = [
    "Alibi",
    "Bias",
    "BiasDrawing",
    "Buckets",
    "Clipped",
    "Distance",
    "DistanceFunction",
    "Gaussian",
    "Linear",
    "Logarithm",
    "Power",
    "Relative",
    "Sum",
    "Tabulated",
    "TensorBias",
    "alibi",
    "buckets",
    "clipped",
    "distance",
    "gaussian",
    "linear",
    "logarithm",
    "parse",
    "power",
    "relative",
]
