"""A trace's weights against those that torch's own layer returns, and its pictures."""

from __future__ import annotations

import pytest
import torch

from clearhead import look
from clearhead.attention import KVCache, MultiHeadAttention
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import causal, padding
from clearhead.models import Decoder, DecoderConfig, EncoderDecoder, tiny_encoder_decoder
from clearhead.positions import ALiBi, RelativeBias, Rotary, Sinusoidal


def test_weights_are_those_that_torch_returns():
    layer = MultiHeadAttention(14, 2).double()
    peer = torch.nn.MultiheadAttention(14, 2, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
    x = torch.randn(3, 5, 14, dtype=torch.float64)
    with look.trace(torch.nn.ModuleDict({"only": layer})) as t:
        layer(x, mask=causal())
    _, theirs = peer(x, x, x, attn_mask=~causal().dense(5), average_attn_weights=False)
    torch.testing.assert_close(t.weights("only"), theirs)


@pytest.mark.parametrize("positions", [Sinusoidal(), Rotary(), ALiBi(), RelativeBias()], ids=str)
def test_recomputed_weights_times_values_are_the_fast_paths_output(positions):
    config = DecoderConfig(
        vocab_size=31, d_model=24, n_heads=6, n_kv_heads=2, n_layers=2, positions=positions
    )
    model = Decoder(config).double().eval()
    with look.trace(model, "blocks.*.attention") as t:
        model(torch.randint(31, (3, 7)))
    assert t.paths == ["blocks.0.attention", "blocks.1.attention"]
    for path in t.paths:
        weights = t.weights(path)
        assert weights.shape == (3, 6, 7, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 6, 7, dtype=torch.float64))
        assert t.difference(path) < 1e-13


def test_cross_attention_hides_padding():
    model = EncoderDecoder(tiny_encoder_decoder()).eval()
    source, target = torch.randint(model.config.vocab_size, (2, 7)), torch.randint(5, (2, 3))
    with look.trace(model, "decoder.blocks.*.cross_attention") as t:
        model(source, target, source_mask=padding([7, 4]))
    weights = t.weights(t.paths[-1])
    assert weights.shape[2:] == (3, 7)
    assert weights[1, ..., 4:].abs().max() == 0
    assert weights[1, ..., :4].min() > 0


def test_nothing_stays_behind_in_the_model():
    model = EncoderDecoder(tiny_encoder_decoder())
    with look.trace(model):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_heatmap():
    picture = look.heatmap(
        torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.6, 0.2]]), ["Hola", "mundo"], ["Hello", "world", "."]
    )
    assert picture.splitlines() == ["      Hello world .", " Hola █████", "mundo ····· ▒▒▒▒▒ ··"]


@pytest.mark.bad_input
def test_what_cannot_be_traced_is_refused():
    model = Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=2)).eval()
    with pytest.raises(
        ConfigError, match=r"no attention layer is called 'heads'; this model has: blocks\.0\.attention"
    ):
        look.trace(model, "heads")
    with look.trace(model) as t:
        with pytest.raises(ShapeError, match=r"has not run inside this trace"):
            t.weights("blocks.0.attention")
        with pytest.raises(ConfigError, match="without a cache"):
            model(torch.zeros(1, 3, dtype=torch.long), cache=KVCache())
    with pytest.raises(ConfigError, match=r"'x' is not recorded"):
        t.weights("x")
    with pytest.raises(ShapeError, match=r"\(2, 3\) and there are 1 row"):
        look.heatmap(torch.zeros(2, 3), ["a"], ["b"])
