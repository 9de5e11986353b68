"""Modules of Transformers: attention, KV cache, norms, residual connections, feed-forward, embeddings, blocks.

Variants (`PreNorm()`, `RMSNorm()`, `SwiGLU()`, …) are frozen values that are stored in configurations."""

from __future__ import annotations

from clearhead.nn.apply_mask import apply_mask
from clearhead.nn.attention import AttentionConfig, Biases, MultiHeadAttention
from clearhead.nn.block import Block, BlockConfig, BlockSpec
from clearhead.nn.embeddings import ConvStem, PatchEmbedding, StackedFrames, TokenEmbedding
from clearhead.nn.feed_forward import FeedForward
from clearhead.nn.init import DepthScaled, Init, TruncatedNormal, Xavier
from clearhead.nn.kv_cache import KVCache
from clearhead.nn.latent_attention import Latent, MultiHeadLatentAttention
from clearhead.nn.mixture_of_experts import Experts, ExpertsFeedForward
from clearhead.nn.norms import LayerNorm, Norm, RMSNorm
from clearhead.nn.residual import Parallel, PostNorm, PreNorm, Residual, ResPostNorm, SandwichNorm
from clearhead.ops.activations import GELU, Activation, ClampedSwiGLU, GeGLU, PoolerActivation, ReLU, SiLU, SwiGLU, Tanh

__all__ = [
    "GELU",
    "Activation",
    "AttentionConfig",
    "Biases",
    "Block",
    "BlockConfig",
    "BlockSpec",
    "ClampedSwiGLU",
    "ConvStem",
    "DepthScaled",
    "Experts",
    "ExpertsFeedForward",
    "FeedForward",
    "GeGLU",
    "Init",
    "KVCache",
    "Latent",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "Norm",
    "Parallel",
    "PatchEmbedding",
    "PoolerActivation",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "ReLU",
    "ResPostNorm",
    "Residual",
    "SandwichNorm",
    "SiLU",
    "StackedFrames",
    "SwiGLU",
    "Tanh",
    "TokenEmbedding",
    "TruncatedNormal",
    "Xavier",
    "apply_mask",
]
