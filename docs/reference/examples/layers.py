import torch
from clearhead import layers
from clearhead.layers import (
    Block,
    BlockConfig,
    FeedForward,
    LayerNorm,
    PatchEmbedding,
    PreNorm,
    RMSNorm,
    TokenEmbedding,
)
from clearhead.masks import causal


block = Block(BlockConfig(d_model=12, n_heads=3))
block(torch.randn(2, 5, 12), mask=causal()).shape  # → torch.Size([2, 5, 12])

FeedForward(12, 48, layers.GELU())(torch.randn(2, 5, 12)).shape  # → torch.Size([2, 5, 12])

(layers.ReLU(), layers.SiLU(), layers.GELU(tanh=True), layers.SwiGLU(), layers.GeGLU())

TokenEmbedding(100, 12)(torch.tensor([[3, 1, 4]])).shape  # → torch.Size([1, 3, 12])

PatchEmbedding(3, 4, 12)(torch.randn(2, 3, 8, 8)).shape  # → torch.Size([2, 4, 12])

(LayerNorm(eps=1e-6), RMSNorm())

(PreNorm(), layers.PostNorm(), layers.Sandwich(), layers.Parallel())

(layers.Xavier(), layers.TruncatedNormal(std=0.02), layers.DepthScaled())

layers.BlockParts(d_model=12, n_heads=3, d_ff=48, residual=PreNorm()).d_ff  # → 48

layers.FrameEmbedding(40, 4, 12)(torch.zeros(2, 16, 40)).shape  # → torch.Size([2, 4, 12])

layers.SoundEmbedding(80, 12)(torch.zeros(2, 16, 80)).shape  # → torch.Size([2, 8, 12])

config = BlockConfig(d_model=12, n_heads=3, experts=layers.Experts(4, top_k=2))
isinstance(Block(config).feed_forward, layers.ExpertsFeedForward)  # → True
