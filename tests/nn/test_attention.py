"""Tests of MultiHeadAttention against torch's layer and the sum over heads, and of KVCache."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead.attention import Additive, HardMax, Softmax, attend
from clearhead.errors import ClearheadError, ShapeError
from clearhead.masks import allow, causal, documents, every, forbid, padding, scattered, window
from clearhead.nn import Biases, KVCache, LayerNorm, MultiHeadAttention, RMSNorm
from clearhead.nn.positions import Rotary

F64 = torch.float64


def torch_copy(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """Return torch's layer with the same parameters."""
    torch_layer = nn.MultiheadAttention(
        layer.d_model,
        layer.n_heads,
        batch_first=True,
        dtype=F64,
        kdim=layer.k_proj.in_features,
        vdim=layer.v_proj.in_features,
    )
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    with torch.no_grad():
        if torch_layer.in_proj_weight is not None:
            torch_layer.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        else:
            for name, p in zip(("q", "k", "v"), projections, strict=True):
                getattr(torch_layer, f"{name}_proj_weight").copy_(p.weight)
        for p in (*projections, layer.o_proj):
            nn.init.normal_(p.bias)
        torch_layer.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        torch_layer.out_proj.load_state_dict(layer.o_proj.state_dict())
    return torch_layer


def outputs_and_gradients(out, inputs, cotangent):
    return (out, *torch.autograd.grad(out, inputs, cotangent))


@pytest.mark.parametrize("mask", [None, causal(), window(1, 2) | every(3)], ids=str)
def test_self_attention_equals_torch(mask):
    layer = MultiHeadAttention(14, 2).double()
    torch_layer = torch_copy(layer)
    x = torch.randn(3, 5, 14, dtype=F64, requires_grad=True)
    cotangent = torch.randn(3, 5, 14, dtype=F64)
    hidden = None if mask is None else ~mask.dense(5)
    expected, _ = torch_layer(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(
        outputs_and_gradients(layer(x, mask=mask), x, cotangent), outputs_and_gradients(expected, x, cotangent)
    )


def test_cross_attention_with_other_widths_and_padding_equals_torch():
    layer = MultiHeadAttention(14, 2, d_key=11, d_value=13).double()
    torch_layer = torch_copy(layer)
    x, key, value = (torch.randn(3, n, m, dtype=F64) for n, m in ((5, 14), (7, 11), (7, 13)))
    lengths = torch.tensor([7, 1, 4])
    expected, _ = torch_layer(x, key, value, key_padding_mask=torch.arange(7) >= lengths[:, None])
    torch.testing.assert_close(layer(x, key, value, mask=padding(lengths)), expected)


def test_forbid_accepts_the_mask_polarity_of_torch():
    layer = MultiHeadAttention(14, 2).double()
    torch_layer = torch_copy(layer)
    x = torch.randn(3, 5, 14, dtype=F64)
    hidden = torch.rand(5, 5) < 0.4
    hidden.fill_diagonal_(False)
    expected, _ = torch_layer(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(layer(x, mask=forbid(hidden)), expected)
    torch.testing.assert_close(layer(x, mask=allow(~hidden)), expected)


def test_multi_head_attention_equals_sum_over_heads():
    layer = MultiHeadAttention(14, 2, d_head=5, bias=False).double()
    x = torch.randn(3, 7, 14, dtype=F64)
    total = 0
    for h in range(2):
        rows = slice(5 * h, 5 * h + 5)
        q, k, v = (x @ p.weight[rows].T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        total = total + attend(q[:, None], k[:, None], v[:, None])[:, 0] @ layer.o_proj.weight[:, rows].T
    torch.testing.assert_close(layer(x), total)


def test_grouped_query_attention_equals_multi_head_attention_with_repeated_parameters():
    grouped = MultiHeadAttention(24, 6, n_kv_heads=2).double()
    full = MultiHeadAttention(24, 6).double()
    full.load_state_dict(
        {
            name: w if name[0] in "qo" else w.unflatten(0, (2, 4)).repeat_interleave(3, 0).flatten(0, 1)
            for name, w in grouped.state_dict().items()
        }
    )
    x = torch.randn(2, 5, 24, dtype=F64)
    torch.testing.assert_close(grouped(x, mask=causal()), full(x, mask=causal()))
    assert sum(p.numel() for p in grouped.parameters()) == 24 * (24 + 8 + 8 + 24) + 24 + 8 + 8 + 24


def test_eight_heads_of_width_512_have_1048576_parameters():
    """CENG 403 (Self-Attention & Transformers), Q2a: 1,048,576 projection weights."""
    assert sum(p.numel() for p in MultiHeadAttention(512, 8, bias=False).parameters()) == 1_048_576


def test_dropout_is_applied_in_training_only():
    layer = MultiHeadAttention(14, 2, dropout=0.5)
    x = torch.randn(3, 5, 14)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_multi_head_attention_supports_custom_scores_and_normalizer():
    layer = MultiHeadAttention(14, 2, scores=Additive(7, 7, 3, n_heads=2), normalizer=HardMax())
    x = torch.randn(3, 5, 14)
    layer(x, mask=causal()).sum().backward()
    assert any(name.startswith("scores.") for name, _ in layer.named_parameters())
    assert layer.v_proj.weight.grad.abs().max() > 0
    assert MultiHeadAttention(14, 2, normalizer=Softmax(0.5))(x).shape == x.shape


class TestCache:
    @pytest.mark.parametrize("rotary", [None, Rotary()], ids=["plain", "rotary"])
    @pytest.mark.parametrize("mask", [causal(), causal() & window(3, 0), causal() & (window(1, 0) | every(3))], ids=str)
    @pytest.mark.parametrize("chunks", [[1] * 11, [5, 1, 1, 4], [11], [2, 9]], ids=str)
    def test_attention_with_cache_equals_attention_without(self, mask, rotary, chunks):
        for dtype, tolerance in ((F64, 1e-14), (torch.float32, 1e-6)):
            layer = MultiHeadAttention(24, 6, n_kv_heads=2, rotary=rotary).to(dtype).eval()
            x = torch.randn(3, 11, 24, dtype=dtype)
            cache = KVCache(capacity=2)
            with torch.no_grad():
                expected = layer(x, mask=mask)
                parts = [layer(part, mask=mask, cache=cache) for part in x.split(chunks, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=tolerance, atol=tolerance)
            assert cache.length == 11

    def test_gradients_with_cache_equal_gradients_without(self):
        layer = MultiHeadAttention(14, 2).double()
        x = torch.randn(3, 5, 14, dtype=F64, requires_grad=True)
        cache = KVCache()
        parts = [layer(part, mask=causal(), cache=cache) for part in x.split([2, 1, 2], 1)]
        (cached,) = torch.autograd.grad(torch.cat(parts, 1).square().sum(), x)
        (plain,) = torch.autograd.grad(layer(x, mask=causal()).square().sum(), x)
        torch.testing.assert_close(cached, plain)

    @pytest.mark.parametrize("trainable", ["q_proj", "v_proj", "bias"])
    def test_gradients_with_cache_and_frozen_keys_equal_gradients_without(self, trainable):
        layer = MultiHeadAttention(14, 2).double().requires_grad_(False)
        x, bias = torch.randn(3, 5, 14, dtype=F64), torch.randn(2, 5, 5, dtype=F64)
        weight = bias.requires_grad_() if trainable == "bias" else getattr(layer, trainable).weight.requires_grad_()
        cache, parts = KVCache(), []
        for start, stop in ((0, 2), (2, 3), (3, 5)):
            part = bias[:, start:stop, :stop]
            parts.append(layer(x[:, start:stop], mask=causal(), bias=part, cache=cache))
        (cached,) = torch.autograd.grad(torch.cat(parts, 1).square().sum(), weight)
        (plain,) = torch.autograd.grad(layer(x, mask=causal(), bias=bias).square().sum(), weight)
        torch.testing.assert_close(cached, plain)

    def test_cross_attention_with_cache_projects_keys_once(self):
        layer = MultiHeadAttention(14, 2).eval()
        memory, x = torch.randn(3, 7, 14), torch.randn(3, 5, 14)
        cache, calls = KVCache(), []
        layer.k_proj.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            expected = layer(x, memory)
            parts = [layer(part, memory, cache=cache) for part in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected)
        assert len(calls) == 1 + 1
        assert cache.length == 0

    def test_append_doubles_capacity_if_full(self):
        cache = KVCache(capacity=3)
        capacities = []
        for i in range(13):
            k, _ = cache.append(torch.full((1, 1, 1, 2), float(i)), torch.zeros(1, 1, 1, 5))
            capacities.append(cache._k.shape[-2])
            assert torch.equal(k[0, 0, :, 0], torch.arange(i + 1.0))
        assert capacities == [3] * 3 + [6] * 3 + [12] * 6 + [24]

    def test_reorder_changes_rows_of_all_layers(self):
        cache = KVCache()
        for name in ("self", "cross"):
            layer_cache = cache[0][name]
            store = layer_cache.append if name == "self" else layer_cache.set_cross
            store(torch.arange(3.0).view(3, 1, 1, 1), torch.arange(3.0).view(3, 1, 1, 1))
        cache.reorder(torch.tensor([2, 0, 0, 1]))
        for name in ("self", "cross"):
            assert cache[0][name].get()[0].flatten().tolist() == [2, 0, 0, 1]

    def test_attention_after_crop_equals_attention_without_cache(self):
        layer = MultiHeadAttention(14, 2).eval()
        x = torch.randn(3, 7, 14)
        cache = KVCache()
        with torch.no_grad():
            layer(x[:, :5], mask=causal(), cache=cache)
            cache.crop(2)
            assert cache.length == 2
            out = layer(x[:, 2:], mask=causal(), cache=cache)
            torch.testing.assert_close(out, layer(x, mask=causal())[:, 2:])

    @pytest.mark.bad_input
    def test_rejected_call_adds_no_tokens_to_the_cache(self):
        layer = MultiHeadAttention(14, 2).eval()
        x = torch.randn(3, 7, 14)
        cache = KVCache()
        with torch.no_grad():
            expected = layer(x, mask=causal())
            layer(x[:, :5], mask=causal(), cache=cache)
            for mask in (
                documents([0] * 6),
                padding([1, 2]),
                scattered(1, 1),
                torch.ones(2, 7, dtype=torch.bool),
            ):
                with pytest.raises(ClearheadError):
                    layer(x[:, 5:], mask=mask, cache=cache)
                assert cache.length == 5
            torch.testing.assert_close(layer(x[:, 5:], mask=causal(), cache=cache), expected[:, 5:])

    @pytest.mark.bad_input
    def test_rejected_cross_attention_call_stores_nothing(self):
        layer = MultiHeadAttention(14, 2).eval()
        x, memory, cache = torch.randn(3, 5, 14), torch.randn(3, 7, 14), KVCache()
        with torch.no_grad():
            with pytest.raises(ShapeError, match="batch"):
                layer(x, memory[:2], cache=cache)
            torch.testing.assert_close(layer(x, memory, cache=cache), layer(x, memory))
            with pytest.raises(ShapeError, match="mask"):
                layer(x, memory, cache=cache, mask=padding([1, 2]))
            assert cache.is_cross

    @pytest.mark.bad_input
    def test_self_and_cross_attention_with_the_cache_of_the_other_raise(self):
        layer = MultiHeadAttention(14, 2).eval()
        x, memory = torch.randn(3, 5, 14), torch.randn(3, 7, 14)
        self_cache, cross_cache = KVCache(), KVCache()
        layer(x, cache=self_cache)
        layer(x, memory, cache=cross_cache)
        with pytest.raises(ShapeError, match="stores 5 tokens of self-attention"):
            layer(x, memory, cache=self_cache)
        with pytest.raises(ShapeError, match="stores an encoder output and cannot grow"):
            layer(x, cache=cross_cache)
        with pytest.raises(ShapeError, match=r"key has 6 tokens.*an encoder output of 7"):
            layer(x, memory[:, 1:], cache=cross_cache)
        assert self_cache.length == 5
        torch.testing.assert_close(layer(x, memory, cache=cross_cache), layer(x, memory))

    def test_repr_shows_length_and_capacity(self):
        cache = KVCache()
        cache[0].append(torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3, 5))
        assert repr(cache) == "KVCache(3 tokens, 1 children)"
        assert repr(cache[0]) == "KVCache(3 tokens, capacity 64)"
        assert cache.n_bytes == 2 * 2 * 64 * 5 * 4


def test_append_after_crop_keeps_earlier_results():
    cache, first, second = KVCache(), *(torch.randn(1, 2, 5, 4) for _ in range(2))
    keys, _ = cache.append(first, first)
    before = keys.clone()
    cache.crop(3)
    k, v = cache.append(second[..., :2, :], second[..., :2, :])
    assert torch.equal(keys, before)
    assert torch.equal(k, torch.cat([first[..., :3, :], second[..., :2, :]], -2))
    assert torch.equal(v, k)


def test_biases_selects_projections_with_bias():
    layer = MultiHeadAttention(14, 2, bias=Biases(k=False, out=False))
    has_bias = {name: getattr(layer, f"{name}_proj").bias is not None for name in "qkvo"}
    assert has_bias == {"q": True, "k": False, "v": True, "o": False}
    # A bias of the keys adds a constant to all scores of a query, which does not change the softmax.
    with_key_bias = MultiHeadAttention(14, 2, bias=Biases(out=False)).double()
    with torch.no_grad():
        with_key_bias.k_proj.bias.normal_()
    layer = layer.double()
    layer.load_state_dict({name: x for name, x in with_key_bias.state_dict().items() if name != "k_proj.bias"})
    x = torch.randn(3, 5, 14, dtype=F64)
    torch.testing.assert_close(layer(x), with_key_bias(x))


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()], ids=str)
def test_qk_norm_normalizes_each_head_before_rotation(norm):
    layer = MultiHeadAttention(14, 2, n_kv_heads=1, d_head=6, qk_norm=norm, rotary=Rotary()).double()
    with torch.no_grad():
        for module in (layer.q_norm, layer.k_norm):
            module.weight.normal_()
    x = torch.randn(3, 5, 14, dtype=F64)

    def heads(projection, n, norm):
        projected = projection(x)
        normalized = torch.stack([norm(projected[..., 6 * h : 6 * (h + 1)]) for h in range(n)], dim=1)
        return Rotary().rotate(normalized, torch.arange(5))

    q, k = heads(layer.q_proj, 2, layer.q_norm), heads(layer.k_proj, 1, layer.k_norm)
    v = layer.v_proj(x)[:, None]
    expected = layer.o_proj(attend(q, k, v, causal()).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, mask=causal()), expected)
    cache = KVCache()
    steps = torch.cat([layer(x[:, i : i + 1], mask=causal(), cache=cache) for i in range(5)], dim=1)
    torch.testing.assert_close(steps, expected)
