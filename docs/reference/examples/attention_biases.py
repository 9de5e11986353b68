import torch
from clearhead.attention import attend, biases
from clearhead.attention.biases import alibi, distance, relative
from clearhead.masks import causal

q, k, v = (torch.randn(1, 4, 6, 8) for _ in range(3))


isinstance(alibi(4), biases.Alibi)  # → True
attend(q, k, v, causal(), bias=alibi(4)).shape  # → torch.Size([1, 4, 6, 8])

table = torch.zeros(8, 4, requires_grad=True)
bias = relative(table, biases.buckets(8, max_distance=20))
isinstance(bias, biases.Relative), isinstance(bias.buckets, biases.Buckets)  # → (True, True)
attend(q, k, v, bias=bias).sum().backward()
table.grad.shape  # → torch.Size([8, 4])

functions = (biases.linear(-0.5), biases.clipped(-0.5, 16), biases.logarithm(-1.0), biases.power(-1.0, 0.5), biases.gaussian(4.0))
[type(function) for function in functions] == [biases.Linear, biases.Clipped, biases.Logarithm, biases.Power, biases.Gaussian]  # → True
isinstance(functions[0], biases.DistanceFunction)  # → True
isinstance(distance(functions[0]), biases.Distance)  # → True
attend(q, k, v, bias=distance(biases.logarithm(-1.0))).shape  # → torch.Size([1, 4, 6, 8])

total = alibi(4) + torch.zeros(6, 6)
isinstance(total, biases.Sum), isinstance(total.terms[1], biases.TensorBias), isinstance(total, biases.Bias)  # → (True, True, True)

biases.parse("alibi(4) + distance(gaussian(2.0))")  # → alibi(4) + distance(gaussian(2.0))

isinstance(alibi(4).draw(8), biases.BiasDrawing)  # → True

from clearhead.nn.positions import ALiBi
isinstance(ALiBi().build(4)(6, 6), biases.Tabulated)  # → True
