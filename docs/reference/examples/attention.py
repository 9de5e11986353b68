import torch
from torch import nn

from clearhead import attention
from clearhead import nn as attention_nn
from clearhead.attention import attend
from clearhead.masks import causal, window
from clearhead.nn import KVCache, MultiHeadAttention, under

q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
attend(q, k, v, causal()).shape  # → torch.Size([2, 4, 5, 8])

layer = MultiHeadAttention(12, 3)
layer(torch.randn(2, 5, 12), mask=causal()).shape  # → torch.Size([2, 5, 12])

cache, layer = KVCache(), MultiHeadAttention(12, 3)
for token in torch.randn(5, 2, 1, 12):
    y = layer(token, mask=causal(), cache=cache)  # one token at a time, as if all had been given

theirs = nn.TransformerEncoderLayer(12, 3, batch_first=True)
with under(theirs, window(1, 1)):
    theirs(torch.randn(2, 5, 12))

q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
for scores in (attention.Dot(), attention.ScaledDot(), attention.Scaled(0.3), attention.SoftCapped(50.0)):
    attend(q, k, v, scores=scores)

q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 6)
attend(q, k, k, scores=attention.Bilinear(4, 6)).shape  # → torch.Size([1, 1, 3, 6])
attend(q, k, k, scores=attention.Additive(4, 6, 5), impl="reference").shape  # → torch.Size([1, 1, 3, 6])

q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
for normalizer in (attention.Softmax(temperature=0.5), attention.HardMax(), attention.StraightThrough(), attention.GumbelSoftmax()):
    attend(q, k, v, normalizer=normalizer)

attention_nn.AttentionConfig(d_model=12, n_heads=4, n_kv_heads=2, bias=attention_nn.Biases(q=True, k=False))
