"""MultiHeadAttention against torch's, against the sum over heads, and with a cache against without."""

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


def copied(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    """torch's layer with the same weights."""
    peer = nn.MultiheadAttention(
        ours.d_model,
        ours.n_heads,
        batch_first=True,
        dtype=F64,
        kdim=ours.k_proj.in_features,
        vdim=ours.v_proj.in_features,
    )
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        if peer.in_proj_weight is not None:
            peer.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        else:
            for name, p in zip(("q", "k", "v"), projections, strict=True):
                getattr(peer, f"{name}_proj_weight").copy_(p.weight)
        for p in (*projections, ours.o_proj):
            nn.init.normal_(p.bias)
        peer.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        peer.out_proj.load_state_dict(ours.o_proj.state_dict())
    return peer


def outputs_and_gradients(out, inputs, cotangent):
    return (out, *torch.autograd.grad(out, inputs, cotangent))


@pytest.mark.parametrize("mask", [None, causal(), window(1, 2) | every(3)], ids=str)
def test_self_attention_equals_torchs(mask):
    ours = MultiHeadAttention(14, 2).double()
    peer = copied(ours)
    x = torch.randn(3, 5, 14, dtype=F64, requires_grad=True)
    cotangent = torch.randn(3, 5, 14, dtype=F64)
    hidden = None if mask is None else ~mask.dense(5)
    theirs, _ = peer(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(
        outputs_and_gradients(ours(x, mask=mask), x, cotangent), outputs_and_gradients(theirs, x, cotangent)
    )


def test_cross_attention_with_other_widths_and_padding_equals_torchs():
    ours = MultiHeadAttention(14, 2, d_key=11, d_value=13).double()
    peer = copied(ours)
    x, key, value = (torch.randn(3, n, m, dtype=F64) for n, m in ((5, 14), (7, 11), (7, 13)))
    lengths = torch.tensor([7, 1, 4])
    theirs, _ = peer(x, key, value, key_padding_mask=torch.arange(7) >= lengths[:, None])
    torch.testing.assert_close(ours(x, key, value, mask=padding(lengths)), theirs)


def test_block_reads_torchs_polarity():
    ours = MultiHeadAttention(14, 2).double()
    peer = copied(ours)
    x = torch.randn(3, 5, 14, dtype=F64)
    hidden = torch.rand(5, 5) < 0.4
    hidden.fill_diagonal_(False)
    theirs, _ = peer(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(ours(x, mask=forbid(hidden)), theirs)
    torch.testing.assert_close(ours(x, mask=allow(~hidden)), theirs)


def test_is_the_sum_over_heads_of_small_attentions():
    ours = MultiHeadAttention(14, 2, d_head=5, bias=False).double()
    x = torch.randn(3, 7, 14, dtype=F64)
    total = 0
    for h in range(2):
        rows = slice(5 * h, 5 * h + 5)
        q, k, v = (x @ p.weight[rows].T for p in (ours.q_proj, ours.k_proj, ours.v_proj))
        total = total + attend(q[:, None], k[:, None], v[:, None])[:, 0] @ ours.o_proj.weight[:, rows].T
    torch.testing.assert_close(ours(x), total)


def test_grouped_heads_equal_many_heads_with_repeated_weights():
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


def test_eight_heads_of_512_have_the_documents_parameters():
    """CENG 403 (Self-Attention & Transformers), Q2a: 1,048,576 projection weights."""
    assert sum(p.numel() for p in MultiHeadAttention(512, 8, bias=False).parameters()) == 1_048_576


def test_dropout_only_in_training():
    layer = MultiHeadAttention(14, 2, dropout=0.5)
    x = torch.randn(3, 5, 14)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_takes_any_scores_and_weights():
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
    def test_gives_the_same_as_no_cache(self, mask, rotary, chunks):
        for dtype, tolerance in ((F64, 1e-14), (torch.float32, 1e-6)):
            layer = MultiHeadAttention(24, 6, n_kv_heads=2, rotary=rotary).to(dtype).eval()
            x = torch.randn(3, 11, 24, dtype=dtype)
            cache = KVCache(capacity=2)
            with torch.no_grad():
                whole = layer(x, mask=mask)
                parts = [layer(part, mask=mask, cache=cache) for part in x.split(chunks, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=tolerance, atol=tolerance)
            assert cache.length == 11

    def test_gradients_flow_through_a_cache(self):
        layer = MultiHeadAttention(14, 2).double()
        x = torch.randn(3, 5, 14, dtype=F64, requires_grad=True)
        cache = KVCache()
        parts = [layer(part, mask=causal(), cache=cache) for part in x.split([2, 1, 2], 1)]
        (cached,) = torch.autograd.grad(torch.cat(parts, 1).square().sum(), x)
        (plain,) = torch.autograd.grad(layer(x, mask=causal()).square().sum(), x)
        torch.testing.assert_close(cached, plain)

    @pytest.mark.parametrize("learned", ["q_proj", "v_proj", "bias"])
    def test_gradients_flow_where_keys_are_frozen(self, learned):
        layer = MultiHeadAttention(14, 2).double().requires_grad_(False)
        x, bias = torch.randn(3, 5, 14, dtype=F64), torch.randn(2, 5, 5, dtype=F64)
        weight = bias.requires_grad_() if learned == "bias" else getattr(layer, learned).weight.requires_grad_()
        cache, parts = KVCache(), []
        for start, stop in ((0, 2), (2, 3), (3, 5)):
            part = bias[:, start:stop, :stop]
            parts.append(layer(x[:, start:stop], mask=causal(), bias=part, cache=cache))
        (cached,) = torch.autograd.grad(torch.cat(parts, 1).square().sum(), weight)
        (plain,) = torch.autograd.grad(layer(x, mask=causal(), bias=bias).square().sum(), weight)
        torch.testing.assert_close(cached, plain)

    def test_cross_attention_computes_its_memory_once(self):
        layer = MultiHeadAttention(14, 2).eval()
        memory, x = torch.randn(3, 7, 14), torch.randn(3, 5, 14)
        cache, calls = KVCache(), []
        layer.k_proj.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            whole = layer(x, memory)
            parts = [layer(part, memory, cache=cache) for part in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        assert len(calls) == 1 + 1
        assert cache.length == 0

    def test_room_doubles(self):
        cache = KVCache(capacity=3)
        rooms = []
        for i in range(13):
            k, _ = cache.append(torch.full((1, 1, 1, 2), float(i)), torch.zeros(1, 1, 1, 5))
            rooms.append(cache._k.shape[-2])
            assert torch.equal(k[0, 0, :, 0], torch.arange(i + 1.0))
        assert rooms == [3] * 3 + [6] * 3 + [12] * 6 + [24]

    def test_reorder_takes_histories_along(self):
        cache = KVCache()
        for name in ("self", "cross"):
            part = cache[0][name]
            keep = part.append if name == "self" else part.set_cross
            keep(torch.arange(3.0).view(3, 1, 1, 1), torch.arange(3.0).view(3, 1, 1, 1))
        cache.reorder(torch.tensor([2, 0, 0, 1]))
        for name in ("self", "cross"):
            assert cache[0][name].get()[0].flatten().tolist() == [2, 0, 0, 1]

    def test_truncate_then_go_on(self):
        layer = MultiHeadAttention(14, 2).eval()
        x = torch.randn(3, 7, 14)
        cache = KVCache()
        with torch.no_grad():
            layer(x[:, :5], mask=causal(), cache=cache)
            cache.crop(2)
            assert cache.length == 2
            rest = layer(x[:, 2:], mask=causal(), cache=cache)
            torch.testing.assert_close(rest, layer(x, mask=causal())[:, 2:])

    @pytest.mark.bad_input
    def test_a_call_that_is_refused_leaves_no_tokens_behind(self):
        layer = MultiHeadAttention(14, 2).eval()
        x = torch.randn(3, 7, 14)
        cache = KVCache()
        with torch.no_grad():
            whole = layer(x, mask=causal())
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
            torch.testing.assert_close(layer(x[:, 5:], mask=causal(), cache=cache), whole[:, 5:])

    @pytest.mark.bad_input
    def test_a_memory_that_is_refused_is_not_kept(self):
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
    def test_tokens_and_a_memory_are_not_taken_for_each_other(self):
        layer = MultiHeadAttention(14, 2).eval()
        x, memory = torch.randn(3, 5, 14), torch.randn(3, 7, 14)
        tokens, kept = KVCache(), KVCache()
        layer(x, cache=tokens)
        layer(x, memory, cache=kept)
        with pytest.raises(ShapeError, match="stores 5 tokens of self-attention"):
            layer(x, memory, cache=tokens)
        with pytest.raises(ShapeError, match="stores an encoder output and cannot grow"):
            layer(x, cache=kept)
        with pytest.raises(ShapeError, match=r"key has 6 tokens.*an encoder output of 7"):
            layer(x, memory[:, 1:], cache=kept)
        assert tokens.length == 5
        torch.testing.assert_close(layer(x, memory, cache=kept), layer(x, memory))

    def test_says_what_it_holds(self):
        cache = KVCache()
        cache[0].append(torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3, 5))
        assert repr(cache) == "KVCache(3 tokens, 1 children)"
        assert repr(cache[0]) == "KVCache(3 tokens, capacity 64)"
        assert cache.n_bytes == 2 * 2 * 64 * 5 * 4


def test_what_a_cache_forgot_stays_as_it_was_for_those_who_hold_it():
    cache, first, other = KVCache(), *(torch.randn(1, 2, 5, 4) for _ in range(2))
    held, _ = cache.append(first, first)
    before = held.clone()
    cache.crop(3)
    k, v = cache.append(other[..., :2, :], other[..., :2, :])
    assert torch.equal(held, before)
    assert torch.equal(k, torch.cat([first[..., :3, :], other[..., :2, :]], -2))
    assert torch.equal(v, k)


def test_biases_of_some_maps_alone():
    layer = MultiHeadAttention(14, 2, bias=Biases(k=False, out=False))
    has = {name: getattr(layer, f"{name}_proj").bias is not None for name in "qkvo"}
    assert has == {"q": True, "k": False, "v": True, "o": False}
    # A bias on every key moves all scores of a row alike, which a softmax does not see.
    whole = MultiHeadAttention(14, 2, bias=Biases(out=False)).double()
    with torch.no_grad():
        whole.k_proj.bias.normal_()
    layer = layer.double()
    layer.load_state_dict({name: x for name, x in whole.state_dict().items() if name != "k_proj.bias"})
    x = torch.randn(3, 5, 14, dtype=F64)
    torch.testing.assert_close(layer(x), whole(x))


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()], ids=str)
def test_queries_and_keys_of_every_head_are_normalised_before_they_are_turned(norm):
    layer = MultiHeadAttention(14, 2, n_kv_heads=1, d_head=6, qk_norm=norm, rotary=Rotary()).double()
    with torch.no_grad():
        for part in (layer.q_norm, layer.k_norm):
            part.weight.normal_()
    x = torch.randn(3, 5, 14, dtype=F64)

    def head(projection, n, normalise):
        whole = projection(x)
        one = torch.stack([normalise(whole[..., 6 * h : 6 * (h + 1)]) for h in range(n)], dim=1)
        return Rotary().rotate(one, torch.arange(5))

    q, k = head(layer.q_proj, 2, layer.q_norm), head(layer.k_proj, 1, layer.k_norm)
    v = layer.v_proj(x)[:, None]
    expected = layer.o_proj(attend(q, k, v, causal()).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, mask=causal()), expected)
    cache = KVCache()
    steps = torch.cat([layer(x[:, i : i + 1], mask=causal(), cache=cache) for i in range(5)], dim=1)
    torch.testing.assert_close(steps, expected)
