import torch
from clearhead import positions
from clearhead.positions import Learned, NoPositions, RelativeBias, Rotary, Sinusoidal


table = positions.SinusoidalPositions(Sinusoidal(), d_model=8)
table(torch.zeros(1, 5, 8)).shape  # → torch.Size([1, 5, 8])

learned = positions.LearnedPositions(Learned(max_len=16), d_model=8)

Rotary(base=500_000.0, stretch=positions.Llama3(factor=8.0))

(positions.Linear(factor=2.0), positions.Yarn(factor=4.0, trained_len=4096))

bias = positions.BucketedBias(RelativeBias(n_buckets=8, max_distance=16), n_heads=2)

slopes = positions.LinearBias(n_heads=4)  # what ALiBi() builds

NoPositions()
