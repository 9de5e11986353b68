"""Attention sinks, compared with a softmax over one more key and with torch's attention with an added key."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clearhead.attention import SinkSoftmax, attend
from clearhead.errors import ShapeError
from clearhead.masks import causal, window

B, H, K, T, D = 2, 6, 3, 7, 5


def inputs(seed=0):
    torch.manual_seed(seed)
    q = torch.randn(B, H, T, D, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(B, K, T, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    return q, k, v, sinks


@pytest.mark.parametrize("mask", [None, causal(), causal() & window(2, 0)], ids=str)
def test_sinks_equal_torch_attention_with_an_added_key(mask):
    q, k, v, sinks = inputs()
    out = attend(q, k, v, mask, normalizer=SinkSoftmax(sinks))
    bias = torch.zeros(T, T, dtype=torch.float64)
    if mask is not None:
        bias = bias.masked_fill(~mask.dense(T, T), -torch.inf)
    bias = torch.cat((bias.expand(H, T, T), sinks[:, None, None].expand(H, T, 1)), dim=-1)
    keys, values = (F.pad(x.repeat_interleave(H // K, dim=1), (0, 0, 0, 1)) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(out)
    for actual, gradient in zip(
        torch.autograd.grad((out * direction).sum(), (q, k, v, sinks)),
        torch.autograd.grad((expected * direction).sum(), (q, k, v, sinks)),
        strict=True,
    ):
        torch.testing.assert_close(actual, gradient, rtol=1e-10, atol=1e-10)


def test_sinks_of_another_number_of_heads_raise():
    q, k, v, _ = inputs()
    with pytest.raises(ShapeError, match="6 heads and 4 sinks"):
        attend(q, k, v, normalizer=SinkSoftmax(torch.zeros(4)))


def test_query_without_keys_gets_zeros_with_a_sink():
    q, k, v, sinks = inputs()
    out = attend(q, k, v, window(0, 0) & ~window(0, 0), normalizer=SinkSoftmax(sinks))
    assert (out == 0).all()
