"""Random inputs of the chunked loss, and its gradients."""

from __future__ import annotations

import torch

N, M, V = 22, 7, 53


def random_inputs(dtype, *, bias, seed=0, n_copies=1, V=V):
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(N, M, generator=make, dtype=torch.float64)
    matrix = torch.randn(V, M, generator=make, dtype=torch.float64)
    offset = torch.randn(V, generator=make, dtype=torch.float64) if bias else None
    labels = torch.randint(V, (N // n_copies,), generator=make).repeat(n_copies)
    weights = (torch.rand(N // n_copies, generator=make) > 0.3).float().repeat(n_copies)
    tensors = [None if t is None else t.to(dtype).requires_grad_() for t in (x, matrix, offset)]
    return tensors, labels, weights


def gradients(total, tensors):
    total.backward()
    values = [total.detach().double(), *(t.grad.double() for t in tensors if t is not None)]
    for t in tensors:
        if t is not None:
            t.grad = None
    return values
