"""Tests that `apply_mask` equals passing the dense mask, for clearhead's and third-party modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.errors import ConfigError, MaskError
from clearhead.masks import causal, every, full, window
from clearhead.models import DecoderConfig, EncoderConfig

MASK = window(3, 1) | every(5)
T, M, H = 13, 12, 3


class Attention(nn.Module):
    """A custom attention layer that calls torch's function; `dense` is the mask to compare with."""

    def __init__(self, is_causal=False, heads=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M)
        self.is_causal, self.heads, self.dense = is_causal, heads, None

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.heads:
            q, k, v = (y.reshape(*y.shape[:-1], H, -1).transpose(-2, -3) for y in (q, k, v))
        if self.dense is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        else:
            allowed = self.dense & causal() if self.is_causal else self.dense
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.dense(T, T))
        return self.out(y.transpose(-2, -3).flatten(-2) if self.heads else y)


class Stack(nn.Module):
    """Three layers with residual connections, with or without activation checkpointing."""

    def __init__(self, checkpointing=False, **options):
        super().__init__()
        self.layers = nn.ModuleList(Attention(**options) for _ in range(3))
        self.checkpointing = checkpointing

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x))
        return x


def build_stack(dense=None, masked_layers=range(3), **options):
    """Return a model with fixed parameters, whose `masked_layers` use the dense mask."""
    torch.manual_seed(5)
    model = Stack(**options).double()
    for i in masked_layers:
        model.layers[i].dense = dense
    return model


def forward_backward(model, x):
    """Return the output and the gradients of all parameters."""
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters())]


def assert_equal(actual, expected):
    """Assert that tensors are equal up to rounding."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"heads": False}, {"checkpointing": True}], ids=str)
def test_apply_mask_equals_dense_mask_forward_and_backward(options):
    x = torch.randn(2, T, M, dtype=torch.float64)
    model = build_stack(**options)
    with ch.apply_mask(model, MASK):
        actual = forward_backward(model, x)
    assert_equal(actual, forward_backward(build_stack(MASK, **options), x))
    torch.testing.assert_close(model(x), build_stack(**options)(x))  # the mask is removed afterwards


@pytest.mark.parametrize(
    ("layers", "masked_layers"), [("layers.1", [1]), (["layers.0", "layers.2"], [0, 2]), ("layers.[02]", [0, 2])]
)
def test_apply_mask_with_layers_masks_matching_modules_only(layers, masked_layers):
    x = torch.randn(2, T, M, dtype=torch.float64)
    model = build_stack()
    with ch.apply_mask(model, MASK, layers=layers):
        actual = forward_backward(model, x)
    assert_equal(actual, forward_backward(build_stack(MASK, masked_layers), x))


def test_nested_apply_mask_combines_masks():
    x = torch.randn(2, T, M, dtype=torch.float64)
    model = build_stack()
    with ch.apply_mask(model, window(4, 4)), ch.apply_mask(model, MASK, layers="layers.1"):
        actual = model(x)
    expected = build_stack(window(4, 4), [0, 2])
    expected.layers[1].dense = MASK & window(4, 4)
    torch.testing.assert_close(actual, expected(x))


def test_apply_mask_does_not_change_other_models():
    x = torch.randn(2, T, M, dtype=torch.float64)
    other_model, model = build_stack(), build_stack()
    with ch.apply_mask(model, MASK):
        model(x)
        torch.testing.assert_close(other_model(x), build_stack()(x), rtol=0, atol=0)


def test_apply_mask_to_torch_layer_equals_src_mask():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(M, H, 17, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(2, T, M, dtype=torch.float64)
    with ch.apply_mask(layer, MASK):
        actual = layer(x)
    torch.testing.assert_close(actual, layer(x, src_mask=~MASK.dense(T, T)))


def test_apply_mask_to_clearhead_model_equals_configured_mask_in_generation():
    sizes = {"vocab_size": 31, "d_model": M, "n_heads": H, "n_layers": 2, "d_ff": 17, "max_len": 40}
    local = window(3, 0) | every(5)
    torch.manual_seed(1)
    model = DecoderConfig(**sizes).build().eval()
    masked = DecoderConfig(**sizes, mask=causal() & local).build().eval()
    masked.load_state_dict(model.state_dict())
    ids = torch.randint(31, (2, T))
    with ch.apply_mask(model, local):
        logits, generated = model(ids), ch.generate(model, ids[:, :5], max_new_tokens=9)
    torch.testing.assert_close(logits, masked(ids))
    expected, unmasked = (ch.generate(m, ids[:, :5], max_new_tokens=9) for m in (masked, model))
    assert torch.equal(generated.ids, expected.ids)
    torch.testing.assert_close(generated.log_probs, expected.log_probs)
    assert not torch.allclose(generated.log_probs, unmasked.log_probs)

    encoder = EncoderConfig(**sizes).build().eval()
    with ch.apply_mask(encoder, full()):
        assert torch.equal(encoder(ids), encoder(ids))


@pytest.mark.compiled
def test_apply_mask_to_compiled_blocks_follows_each_mask():
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = DecoderConfig(vocab_size=31, d_model=M, n_heads=H, n_layers=2, d_ff=17, max_len=40).build().eval()
    ids, local = torch.randint(31, (2, T)), window(3, 0) | every(5)
    with torch.no_grad():
        plain = model(ids)
        with ch.apply_mask(model, local):
            masked = model(ids)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        for mask, expected in ((local, masked), (full(), plain), (local, masked)):
            with ch.apply_mask(model, mask):
                torch.testing.assert_close([model(ids), model(ids)], [expected, expected])
        torch.testing.assert_close(model(ids), plain)


@pytest.mark.bad_input
class TestBadInput:
    x = torch.randn(2, T, M, dtype=torch.float64)

    def test_model_without_sdpa_call_raises(self):
        model = nn.Sequential(nn.Linear(M, M)).double()
        with pytest.raises(ConfigError, match=r"Sequential never called.*no effect"), ch.apply_mask(model, MASK):
            model(self.x)
        with ch.apply_mask(model, MASK):
            pass  # no error if the model did not run

    def test_error_inside_propagates_and_removes_the_mask(self):
        model = build_stack()
        with pytest.raises(ZeroDivisionError), ch.apply_mask(model, MASK):
            raise ZeroDivisionError
        with pytest.raises(RuntimeError), ch.apply_mask(model, MASK):
            model(self.x[..., :5])
        torch.testing.assert_close(model(self.x), build_stack()(self.x), rtol=0, atol=0)

    def test_unknown_layer_raises_with_suggestion(self):
        with pytest.raises(ConfigError, match=r"no module 'layer\.1'; did you mean 'layers\.1'"):
            ch.apply_mask(build_stack(), MASK, layers="layer.1").__enter__()

    def test_cross_attention_or_preallocated_cache_raises(self):
        class Cross(nn.Module):
            def forward(self, q, k, allowed=None):
                return F.scaled_dot_product_attention(q, k, k, attn_mask=allowed)

        q, k = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 7, 4)
        with (
            pytest.raises(MaskError, match="5 queries attend to 7 keys of another sequence"),
            ch.apply_mask(cross := Cross(), MASK),
        ):
            cross(q, k)
        empty = torch.arange(7) < 6
        with pytest.raises(MaskError, match="preallocated cache"), ch.apply_mask(cross, MASK):
            cross(q[..., -1:, :], k, empty[None])
        assert cross(q, k).shape == q.shape

    @pytest.mark.compiled
    @pytest.mark.parametrize("compiled", ["forward", "module", "in place"])
    def test_compiled_layers_share_one_graph_per_mask(self, compiled):
        """Calls run without the mask, with it, and without it again."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(5)
        model = nn.Sequential(*(Attention() for _ in range(6))).double()
        with torch.no_grad():
            plain = model(self.x)
            with ch.apply_mask(model, MASK):
                masked = model(self.x)
            for i, layer in enumerate(model):
                if compiled == "forward":
                    layer.forward = torch.compile(layer.forward, backend="aot_eager")
                elif compiled == "module":
                    model[i] = torch.compile(layer, backend="aot_eager")
                else:
                    layer.compile(backend="aot_eager")
            assert_equal([model(self.x)], [plain])
            for _ in range(2):
                with ch.apply_mask(model, MASK):
                    assert_equal([model(self.x), model(self.x)], [masked, masked])
                with ch.apply_mask(model, MASK, layers=["0", "1", "2", "3", "4", "5"]):
                    assert_equal([model(self.x)], [masked])
            assert_equal([model(self.x)], [plain])
        # One with the mask and one without; with one graph per layer there would be six times as many.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2

    def test_compiled_model_raises(self):
        with pytest.raises(ConfigError, match="is compiled"):
            ch.apply_mask(torch.compile(build_stack()), MASK).__enter__()
