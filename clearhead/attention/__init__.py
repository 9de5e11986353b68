"""How attention is computed: scores, weights, the one entry `attend`, multi-head attention and its cache."""

from clearhead.attention.attend import attend
from clearhead.attention.cache import KVCache
from clearhead.attention.multihead import AttentionConfig, Biases, MultiHeadAttention
from clearhead.attention.scores import Additive, Bilinear, Capped, Dot, Scaled, ScaledDot
from clearhead.attention.under import under
from clearhead.attention.weights import Gumbel, Hard, Softmax, StraightThrough

__all__ = [
    "Additive", "AttentionConfig", "Biases", "Bilinear", "Capped", "Dot", "Gumbel", "Hard", "KVCache",
    "MultiHeadAttention", "Scaled", "ScaledDot", "Softmax", "StraightThrough", "attend", "under",
]  # fmt: skip
