"""`under`: a mask under every attention call of a module, ours or another's, is that mask given densely."""

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
    """Attention as people write it; `dense` stands for the mask, to compare with."""

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
    def __init__(self, recompute=False, **how):
        super().__init__()
        self.layers = nn.ModuleList(Attention(**how) for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


def made(dense=None, chosen=range(3), **how):
    torch.manual_seed(5)
    model = Stack(**how).double()
    for i in chosen:
        model.layers[i].dense = dense
    return model


def outcome(model, x):
    """What a model gives, and the gradients."""
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters())]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"heads": False}, {"recompute": True}], ids=str)
def test_forward_and_backward_are_those_of_the_dense_mask(how):
    x = torch.randn(2, T, M, dtype=torch.float64)
    model = made(**how)
    with ch.apply_mask(model, MASK):
        ours = outcome(model, x)
    same(ours, outcome(made(MASK, **how), x))
    torch.testing.assert_close(model(x), made(**how)(x))  # afterwards it is as it was


@pytest.mark.parametrize(
    ("layers", "chosen"), [("layers.1", [1]), (["layers.0", "layers.2"], [0, 2]), ("layers.[02]", [0, 2])]
)
def test_layers_are_chosen_by_path(layers, chosen):
    x = torch.randn(2, T, M, dtype=torch.float64)
    model = made()
    with ch.apply_mask(model, MASK, layers=layers):
        ours = outcome(model, x)
    same(ours, outcome(made(MASK, chosen), x))


def test_masks_meet_where_blocks_are_nested():
    x = torch.randn(2, T, M, dtype=torch.float64)
    model = made()
    with ch.apply_mask(model, window(4, 4)), ch.apply_mask(model, MASK, layers="layers.1"):
        got = model(x)
    wanted = made(window(4, 4), [0, 2])
    wanted.layers[1].dense = MASK & window(4, 4)
    torch.testing.assert_close(got, wanted(x))


def test_another_model_is_left_alone():
    x = torch.randn(2, T, M, dtype=torch.float64)
    other, model = made(), made()
    with ch.apply_mask(model, MASK):
        model(x)
        torch.testing.assert_close(other(x), made()(x), rtol=0, atol=0)


def test_torchs_own_layers():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(M, H, 17, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(2, T, M, dtype=torch.float64)
    with ch.apply_mask(layer, MASK):
        got = layer(x)
    torch.testing.assert_close(got, layer(x, src_mask=~MASK.dense(T, T)))


def test_our_own_models_and_their_generation():
    how = {"vocab_size": 31, "d_model": M, "n_heads": H, "n_layers": 2, "d_ff": 17, "max_len": 40}
    local = window(3, 0) | every(5)
    torch.manual_seed(1)
    model = DecoderConfig(**how).build().eval()
    masked = DecoderConfig(**how, mask=causal() & local).build().eval()
    masked.load_state_dict(model.state_dict())
    ids = torch.randint(31, (2, T))
    with ch.apply_mask(model, local):
        got, written = model(ids), ch.generate(model, ids[:, :5], max_new_tokens=9)
    torch.testing.assert_close(got, masked(ids))
    wanted, plain = (ch.generate(other, ids[:, :5], max_new_tokens=9) for other in (masked, model))
    assert torch.equal(written.ids, wanted.ids)
    torch.testing.assert_close(written.log_probs, wanted.log_probs)
    assert not torch.allclose(written.log_probs, plain.log_probs)

    encoder = EncoderConfig(**how).build().eval()
    with ch.apply_mask(encoder, full()):
        assert torch.equal(encoder(ids), encoder(ids))


@pytest.mark.compiled
def test_our_own_compiled_blocks():
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
        for mask, wanted in ((local, masked), (full(), plain), (local, masked)):
            with ch.apply_mask(model, mask):
                torch.testing.assert_close([model(ids), model(ids)], [wanted, wanted])
        torch.testing.assert_close(model(ids), plain)


@pytest.mark.bad_input
class TestBadInput:
    x = torch.randn(2, T, M, dtype=torch.float64)

    def test_attention_by_hand_is_not_seen(self):
        model = nn.Sequential(nn.Linear(M, M)).double()
        with pytest.raises(ConfigError, match=r"Sequential never called.*no effect"), ch.apply_mask(model, MASK):
            model(self.x)
        with ch.apply_mask(model, MASK):
            pass  # nothing ran: nothing to say

    def test_an_error_inside_is_the_one_that_is_seen(self):
        model = made()
        with pytest.raises(ZeroDivisionError), ch.apply_mask(model, MASK):
            raise ZeroDivisionError
        with pytest.raises(RuntimeError), ch.apply_mask(model, MASK):
            model(self.x[..., :5])
        torch.testing.assert_close(model(self.x), made()(self.x), rtol=0, atol=0)

    def test_a_layer_that_is_not_there(self):
        with pytest.raises(ConfigError, match=r"no module 'layer\.1'; did you mean 'layers\.1'"):
            ch.apply_mask(made(), MASK, layers="layer.1").__enter__()

    def test_another_sequence(self):
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
    @pytest.mark.parametrize("how", ["its forward", "the layer", "in place"])
    def test_compiled_layers_share_a_graph_and_see_each_mask(self, how):
        """Without the mask, with it, and without it again."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(5)
        model = nn.Sequential(*(Attention() for _ in range(6))).double()
        with torch.no_grad():
            plain = model(self.x)
            with ch.apply_mask(model, MASK):
                masked = model(self.x)
            for i, layer in enumerate(model):
                if how == "its forward":
                    layer.forward = torch.compile(layer.forward, backend="aot_eager")
                elif how == "the layer":
                    model[i] = torch.compile(layer, backend="aot_eager")
                else:
                    layer.compile(backend="aot_eager")
            same([model(self.x)], [plain])
            for _ in range(2):
                with ch.apply_mask(model, MASK):
                    same([model(self.x), model(self.x)], [masked, masked])
                with ch.apply_mask(model, MASK, layers=["0", "1", "2", "3", "4", "5"]):
                    same([model(self.x)], [masked])
            same([model(self.x)], [plain])
        # Outside and in each of the four blocks. One for every layer would be six times as many.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 5

    def test_a_compiled_model(self):
        with pytest.raises(ConfigError, match="is compiled"):
            ch.apply_mask(torch.compile(made()), MASK).__enter__()
