"""Attention that a module writes out as softmax(q @ k.T) @ v."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead import analysis
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import causal

B, T, S, H, M = 3, 5, 7, 4, 24


@pytest.fixture(scope="module")
def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is an optional peer")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=M, n_head=H, n_layer=2, vocab_size=31, attn_implementation="sdpa")
    return transformers.GPT2LMHeadModel(config).eval()


class SoftmaxAttention(nn.Module):
    """The usual code of a course: softmax(q @ k.T) @ v, with or without heads, in several spellings."""

    def __init__(self, spelling="method", heads=2, dropout=0.0):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.spelling, self.heads = spelling, heads
        self.normalize, self.dropout = nn.Softmax(dim=-1), nn.Dropout(dropout)
        self.weights = None  # of the last call, to compare with

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.heads:
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~causal().dense(x.shape[-2]), -math.inf)
        if self.spelling == "module":
            weights = self.normalize(scores)
        else:
            weights = F.softmax(scores, dim=-1) if self.spelling == "function" else scores.softmax(-1)
        self.weights = weights.detach().clone()
        weights = self.dropout(weights)
        out = torch.matmul(weights, v) if self.spelling == "function" else weights @ v
        return out.transpose(-2, -3).flatten(-2) if self.heads else out


@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("spelling", ["method", "function", "module"])
def test_trace_records_written_out_attention(spelling, heads):
    model = nn.Sequential(SoftmaxAttention(spelling, heads), nn.Linear(6, 6), SoftmaxAttention(spelling, heads))
    x = torch.randn(3, 5, 6)
    with torch.no_grad(), analysis.trace(model) as t:
        out = model(x)
        model(x[:2])
    assert (t.paths, t.runs) == (["0", "2"], 2)
    weights = t.weights("2", run=0)
    assert weights.shape == (3, heads or 1, 5, 5)
    expected_out = (weights @ t.values("2", run=0)).transpose(-2, -3).flatten(-2)
    torch.testing.assert_close(expected_out, out)
    assert torch.equal(t.weights("2"), model[2].weights if heads else model[2].weights[:, None])
    assert torch.equal(t.weights("2", rows=[4, 1], heads=0), t.weights("2")[:, :1, [4, 1]])
    assert t.difference("2") <= t.tolerance("2")
    assert "softmax(q @ k.T) @ v" in t.report()


def test_written_out_weights_are_those_before_dropout():
    model = SoftmaxAttention(dropout=0.5).train()
    with analysis.trace(model) as t:
        model(torch.randn(2, 5, 6)).sum().backward()
    assert torch.equal(t.weights(""), model.weights)
    torch.testing.assert_close(t.weights("").sum(-1), torch.ones(2, 2, 5))


def test_ablated_head_of_written_out_attention_is_zero():
    model, x = SoftmaxAttention(), torch.randn(2, 5, 6)
    with torch.no_grad(), analysis.trace(model) as t:
        t.intervene("", analysis.ZeroAblation(heads=[1]))
        out = model(x)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(out[..., :3], expected[..., :3])
    assert (out[..., 3:] == 0).all()


def test_trace_gpt2_eager_equals_returned_attentions(gpt2):
    ids = torch.randint(31, (B, 11))
    gpt2.set_attn_implementation("eager")
    try:
        with torch.no_grad(), analysis.trace(gpt2) as t:
            eager = gpt2(ids, output_attentions=True)
    finally:
        gpt2.set_attn_implementation("sdpa")
    for path, expected in zip(t.paths, eager.attentions, strict=True):
        torch.testing.assert_close(t.weights(path), expected)


@pytest.mark.bad_input
def test_inputs_of_written_out_attention_are_unknown():
    model = SoftmaxAttention()
    with analysis.trace(model) as t:
        model(torch.randn(2, 5, 6))
    with pytest.raises(ConfigError, match=r"the model computes softmax\(q @ k\.T\) @ v itself, so q and k are unknown"):
        t.attention_inputs("")


class EinsumAttention(nn.Module):
    """Attention by operations that are not recognized."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("btd,bsd->bts", x, x).exp()
        return torch.einsum("bts,bsd->btd", scores / scores.sum(-1, keepdim=True), x)


UNSEEN = "No attention was recorded. A trace records clearhead's attend and MultiHeadAttention, torch's"


def test_trace_without_attention_reports_reason():
    model = nn.Sequential(EinsumAttention(), EinsumAttention())
    with analysis.trace(model) as t:
        model(torch.randn(2, 5, 6))
    assert t.paths == []
    assert t.report().startswith(UNSEEN)
    assert "softmax(q @ k.T) @ v" in t.report()
    assert UNSEEN in repr(t)
    with pytest.raises(ShapeError, match=r"0 has no weights\. No attention was recorded"):
        t.weights("0")
    with pytest.raises(ConfigError, match="No attention was recorded"):
        analysis.build_report(t, title="by hand")


def test_trace_without_run_reports_reason():
    model = SoftmaxAttention()
    with analysis.trace(model) as t:
        pass
    assert t.report() == "Nothing has run inside this trace; call the model in its `with` block."
    with analysis.trace(model, "output") as t:
        model(torch.randn(2, 5, 6))
    assert t.report().startswith("No attention is recorded because the patterns name only outputs or inputs")
    assert repr(t) == "Trace(0 attention layers, 1 outputs, 1 runs)"


@pytest.mark.bad_input
def test_unmatched_pattern_suggests_no_empty_name():
    with pytest.raises(ConfigError, match="no module of this model matches 'weights'") as caught:
        analysis.trace(nn.Sequential(SoftmaxAttention()), "weights")
    assert "did you mean ?" not in str(caught.value)
    assert "did you mean ''" not in str(caught.value)
