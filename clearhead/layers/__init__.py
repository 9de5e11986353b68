"""What a model is put together from: norms, residual connections, feed-forward, embeddings, the block, and how weights
begin. Choices (`PreNorm()`, `RMSNorm()`, `SwiGLU()`, …) are frozen values in configs; the rest are modules."""

from __future__ import annotations

from clearhead.layers.block import Block, BlockConfig, BlockParts
from clearhead.layers.embeddings import FrameEmbedding, PatchEmbedding, SoundEmbedding, TokenEmbedding
from clearhead.layers.experts import Experts, ExpertsFeedForward
from clearhead.layers.feedforward import GELU, Activation, FeedForward, GeGLU, ReLU, SiLU, SwiGLU
from clearhead.layers.init import DepthScaled, Init, TruncatedNormal, Xavier
from clearhead.layers.norms import LayerNorm, Norm, Parallel, PostNorm, PreNorm, Residual, RMSNorm, Sandwich

__all__ = [
    "GELU", "Activation", "Block", "BlockConfig", "BlockParts", "DepthScaled", "Experts", "ExpertsFeedForward",
    "FeedForward", "FrameEmbedding", "GeGLU", "Init", "LayerNorm", "Norm", "Parallel", "PatchEmbedding", "PostNorm",
    "PreNorm", "RMSNorm", "ReLU", "Residual", "Sandwich", "SiLU", "SoundEmbedding", "SwiGLU", "TokenEmbedding",
    "TruncatedNormal", "Xavier",
]  # fmt: skip
