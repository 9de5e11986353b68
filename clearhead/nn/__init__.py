"""What a model is put together from: norms, residual connections, feed-forward, embeddings, the block, and how weights
begin. Choices (`PreNorm()`, `RMSNorm()`, `SwiGLU()`, …) are frozen values in configs; the rest are modules."""

from __future__ import annotations

from clearhead.nn.apply_mask import apply_mask
from clearhead.nn.attention import AttentionConfig, Biases, MultiHeadAttention
from clearhead.nn.block import Block, BlockConfig, BlockSpec
from clearhead.nn.embeddings import ConvStem, PatchEmbedding, StackedFrames, TokenEmbedding
from clearhead.nn.feed_forward import FeedForward
from clearhead.nn.init import DepthScaled, Init, TruncatedNormal, Xavier
from clearhead.nn.kv_cache import KVCache
from clearhead.nn.mixture_of_experts import Experts, ExpertsFeedForward
from clearhead.nn.norms import LayerNorm, Norm, Parallel, PostNorm, PreNorm, Residual, RMSNorm, SandwichNorm
from clearhead.ops.activations import GELU, Activation, GeGLU, ReLU, SiLU, SwiGLU

__all__ = [
    "GELU",
    "Activation",
    "AttentionConfig",
    "Biases",
    "Block",
    "BlockConfig",
    "BlockSpec",
    "ConvStem",
    "DepthScaled",
    "Experts",
    "ExpertsFeedForward",
    "FeedForward",
    "GeGLU",
    "Init",
    "KVCache",
    "LayerNorm",
    "MultiHeadAttention",
    "Norm",
    "Parallel",
    "PatchEmbedding",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "ReLU",
    "Residual",
    "SandwichNorm",
    "SiLU",
    "StackedFrames",
    "SwiGLU",
    "TokenEmbedding",
    "TruncatedNormal",
    "Xavier",
    "apply_mask",
]
