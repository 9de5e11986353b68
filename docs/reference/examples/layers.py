import torch

from clearhead import nn as layers_nn
from clearhead.masks import causal
from clearhead.nn import Block, BlockConfig, FeedForward, LayerNorm, PatchEmbedding, PreNorm, RMSNorm, TokenEmbedding

block = Block(BlockConfig(d_model=12, n_heads=3))
block(torch.randn(2, 5, 12), mask=causal()).shape  # → torch.Size([2, 5, 12])

FeedForward(12, 48, layers_nn.GELU())(torch.randn(2, 5, 12)).shape  # → torch.Size([2, 5, 12])

(layers_nn.ReLU(), layers_nn.SiLU(), layers_nn.GELU(tanh=True), layers_nn.SwiGLU(), layers_nn.GeGLU())

TokenEmbedding(100, 12)(torch.tensor([[3, 1, 4]])).shape  # → torch.Size([1, 3, 12])

PatchEmbedding(3, 4, 12)(torch.randn(2, 3, 8, 8)).shape  # → torch.Size([2, 4, 12])

(LayerNorm(eps=1e-6), RMSNorm())

(PreNorm(), layers_nn.PostNorm(), layers_nn.Sandwich(), layers_nn.Parallel())

(layers_nn.Xavier(), layers_nn.TruncatedNormal(std=0.02), layers_nn.DepthScaled())

layers_nn.BlockParts(d_model=12, n_heads=3, d_ff=48, residual=PreNorm()).d_ff  # → 48

layers_nn.FrameEmbedding(40, 4, 12)(torch.zeros(2, 16, 40)).shape  # → torch.Size([2, 4, 12])

layers_nn.SoundEmbedding(80, 12)(torch.zeros(2, 16, 80)).shape  # → torch.Size([2, 8, 12])

config = BlockConfig(d_model=12, n_heads=3, experts=layers_nn.Experts(4, top_k=2))
isinstance(Block(config).feed_forward, layers_nn.ExpertsFeedForward)  # → True
