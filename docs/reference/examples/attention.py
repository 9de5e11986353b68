import torch
from clearhead import attention
from clearhead.attention import attend
from clearhead.masks import causal, window


q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
attend(q, k, v, causal()).shape  # → torch.Size([2, 4, 5, 8])

q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
for scores in (attention.Dot(), attention.ScaledDot(), attention.Scaled(0.3), attention.SoftCapped(50.0)):
    attend(q, k, v, scores=scores)

q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 6)
attend(q, k, k, scores=attention.Bilinear(4, 6)).shape  # → torch.Size([1, 1, 3, 6])
attend(q, k, k, scores=attention.Additive(4, 6, 5), impl="reference").shape  # → torch.Size([1, 1, 3, 6])

q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
for normalizer in (attention.Softmax(temperature=0.5), attention.HardMax(), attention.StraightThrough(), attention.GumbelSoftmax()):
    attend(q, k, v, normalizer=normalizer)

q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
attend(q, k, v, causal(), normalizer=attention.SinkSoftmax(torch.zeros(2))).shape  # → torch.Size([1, 2, 3, 4])
