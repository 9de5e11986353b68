"""The layout of matrices in GGUF files."""

from __future__ import annotations

import numpy as np


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k: the pairs of a rotation side by side."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
