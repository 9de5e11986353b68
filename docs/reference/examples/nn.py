import torch
from clearhead import nn
from clearhead.masks import causal, window
from clearhead.nn import Block, BlockConfig, FeedForward, KVCache, LayerNorm, MultiHeadAttention, PatchEmbedding, PreNorm, RMSNorm, TokenEmbedding, apply_mask


block = Block(BlockConfig(d_model=12, n_heads=3))
block(torch.randn(2, 5, 12), mask=causal()).shape  # → torch.Size([2, 5, 12])

FeedForward(12, 48, nn.GELU())(torch.randn(2, 5, 12)).shape  # → torch.Size([2, 5, 12])

(nn.ReLU(), nn.SiLU(), nn.GELU(tanh=True), nn.SwiGLU(), nn.GeGLU(), nn.Tanh())

TokenEmbedding(100, 12)(torch.tensor([[3, 1, 4]])).shape  # → torch.Size([1, 3, 12])

PatchEmbedding(3, 4, 12)(torch.randn(2, 3, 8, 8)).shape  # → torch.Size([2, 4, 12])

(LayerNorm(eps=1e-6), RMSNorm())

(PreNorm(), nn.PostNorm(), nn.SandwichNorm(), nn.Parallel())

(nn.Xavier(), nn.TruncatedNormal(std=0.02), nn.DepthScaled())

nn.BlockSpec(d_model=12, n_heads=3, d_ff=48, residual=PreNorm()).d_ff  # → 48

nn.StackedFrames(40, 4, 12)(torch.zeros(2, 16, 40)).shape  # → torch.Size([2, 4, 12])

nn.ConvStem(80, 12)(torch.zeros(2, 16, 80)).shape  # → torch.Size([2, 8, 12])

config = BlockConfig(d_model=12, n_heads=3, experts=nn.Experts(4, top_k=2))
isinstance(Block(config).feed_forward, nn.ExpertsFeedForward)  # → True

layer = MultiHeadAttention(12, 3)
layer(torch.randn(2, 5, 12), mask=causal()).shape  # → torch.Size([2, 5, 12])

cache, layer = KVCache(), MultiHeadAttention(12, 3)
for token in torch.randn(5, 2, 1, 12):
    y = layer(token, mask=causal(), cache=cache)  # one token at a time, as if all had been given

layer = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
with apply_mask(layer, window(1, 1)):
    layer(torch.randn(2, 5, 12))

nn.AttentionConfig(d_model=12, n_heads=4, n_kv_heads=2, bias=nn.Biases(q=True, k=False))

FeedForward(12, 48, nn.ClampedSwiGLU())(torch.randn(2, 5, 12)).shape  # → torch.Size([2, 5, 12])

latent = nn.Latent(kv_rank=6, d_rope=2, d_value=4)
nn.MultiHeadLatentAttention(12, 3, latent, d_head=6)(torch.randn(2, 5, 12)).shape  # → torch.Size([2, 5, 12])

nn.ResPostNorm()
