import torch
from clearhead.nn import positions
from clearhead.nn.positions import LearnedPositions, NoPE, RelativeBias, Rotary, Sinusoidal


table = positions.SinusoidalPositions(Sinusoidal(), d_model=8)
table(torch.zeros(1, 5, 8)).shape  # → torch.Size([1, 5, 8])

learned = positions.LearnedPositionEmbedding(LearnedPositions(max_len=16), d_model=8)

Rotary(base=500_000.0, scaling=positions.Llama3Scaling(factor=8.0))

(positions.LinearScaling(factor=2.0), positions.YarnScaling(factor=4.0, original_max_len=4096))

bias = positions.T5Bias(RelativeBias(n_buckets=8, max_distance=16), n_heads=2)

slopes = positions.ALiBiBias(n_heads=4)  # what ALiBi() builds

NoPE()

Rotary(scaling=positions.DynamicNTKScaling(factor=2.0, original_max_len=2048))

Rotary(scaling=positions.LongRopeScaling(short=(1.0, 1.0), long=(1.5, 4.0), original_max_len=4096))

encoding = positions.DisentangledPositions(positions.Disentangled(n_buckets=4, max_distance=8), d_model=12)
isinstance(encoding(5, 5), positions.ContentBias)  # → True
