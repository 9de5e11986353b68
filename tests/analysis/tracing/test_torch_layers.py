"""Third-party modules: torch layers compared with the weights they return, GPT-2 compared with eager attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention  # imported by name, as in many modules
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import analysis
from clearhead.errors import ConfigError
from clearhead.masks import causal

B, T, S, H, M = 3, 5, 7, 4, 24


class OperatorNames(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def with_biases(module):
    """Randomize biases, which torch initializes to zero, so that a missing bias changes the result."""
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return module


def masks():
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[1, 4:] = True
    yield "no mask", {}
    yield "padding", {"key_padding_mask": hidden}
    yield "bool", {"attn_mask": torch.rand(T, S) < 0.3}
    yield "float", {"attn_mask": torch.randn(T, S)}
    yield "one a head", {"attn_mask": torch.randn(B * H, T, S)}
    yield "both", {"attn_mask": torch.rand(B * H, T, S) < 0.3, "key_padding_mask": hidden}
    yield "float padding", {"key_padding_mask": torch.zeros(B, S).masked_fill(hidden, -math.inf)}


@pytest.mark.parametrize("kind", [name for name, _ in masks()])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_trace_torch_cross_attention_equals_returned_weights(kind, batch_first, need_weights):
    layer = with_biases(nn.MultiheadAttention(M, H, batch_first=batch_first, kdim=10, vdim=13)).eval()
    x, key, value = torch.randn(B, T, M), torch.randn(B, S, 10), torch.randn(B, S, 13)
    inputs = [x if batch_first else x.transpose(0, 1) for x in (x, key, value)]
    arguments = dict(masks())[kind]
    with torch.no_grad():
        _, expected = layer(*inputs, average_attn_weights=False, **arguments)
        with analysis.trace(nn.ModuleDict({"layer": layer})) as t:
            layer(*inputs, need_weights=need_weights, **arguments)
    assert t.paths == ["layer"]
    torch.testing.assert_close(t.weights("layer"), expected)
    torch.testing.assert_close(t.weights("layer", heads=[2], rows=[4, 1]), expected[:, [2]][:, :, [4, 1]])
    assert t.difference("layer") <= t.tolerance("layer")
    assert t.difference("layer", rows=[3]) <= t.tolerance("layer", rows=[3])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch", [True, False])
def test_trace_torch_fast_path_equals_returned_weights(training, batch):
    """In evaluation without gradients, torch runs the whole layer as one operator, which is recorded too."""
    layer = with_biases(nn.MultiheadAttention(M, H, batch_first=True)).train(training)
    x = torch.randn(B, T, M) if batch else torch.randn(T, M)
    with torch.no_grad(), OperatorNames() as operators:
        _, expected = layer(x, x, x, average_attn_weights=False)
        with analysis.trace(layer) as t:
            layer(x, x, x, need_weights=False)
    n_fast = operators.names.count("_native_multi_head_attention")
    assert n_fast == (2 if batch and not training else 0)
    assert not t.values("").requires_grad
    torch.testing.assert_close(t.weights(""), expected if batch else expected[None])
    assert t.difference("") <= t.tolerance("")
    torch.testing.assert_close(t.heads("")[..., :1, :], (t.weights("", rows=0) @ t.values("")))


@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}], ids=str)
def test_trace_torch_layer_with_additional_keys(extra):
    layer = with_biases(nn.MultiheadAttention(M, H, batch_first=True, **extra)).double()
    x = torch.randn(B, T, M, dtype=torch.float64)
    hidden = torch.zeros(B, T, dtype=torch.bool)
    hidden[1, 3:] = True
    arguments = {"attn_mask": ~causal().dense(T), "key_padding_mask": hidden}
    _, expected = layer(x, x, x, average_attn_weights=False, **arguments)
    with analysis.trace(layer) as t:
        layer(x, x, x, **arguments)
    torch.testing.assert_close(t.weights(""), expected)
    assert t.difference("") <= t.tolerance("")


@pytest.mark.parametrize("kind", ["no mask", "padding", "causal"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_trace_torch_encoder_in_evaluation_equals_slow_path(kind, norm_first):
    """Padded batches become nested tensors; weights and outputs equal those of padded tensors."""
    layer = nn.TransformerEncoderLayer(M, H, 32, batch_first=True, norm_first=norm_first)
    model = with_biases(nn.TransformerEncoder(layer, 2)).eval()
    x = torch.randn(B, T, M)
    lengths = torch.tensor([5, 2, 4]) if kind == "padding" else torch.tensor([T] * B)
    hidden = torch.arange(T) >= lengths[:, None]
    arguments = {
        "no mask": {},
        "padding": {"src_key_padding_mask": hidden},
        "causal": {"mask": ~causal().dense(T)},
    }[kind]
    with torch.no_grad():
        expected = model(x, **arguments)
        with analysis.trace(model, "layers.*.self_attn", "layers.*.output") as t:
            traced = model(x, **arguments)
        with analysis.trace(model) as reference:  # with gradients, torch does not use its fast path
            torch.enable_grad()(model)(x, **arguments)
    torch.testing.assert_close(traced, expected)
    assert t.paths == ["layers.0.self_attn", "layers.1.self_attn"]
    for path in t.paths:
        assert t.difference(path) <= t.tolerance(path)
        for row, n in enumerate(lengths.tolist()):
            torch.testing.assert_close(t.weights(path)[row, :, :n], reference.weights(path)[row, :, :n])
    assert [norm.shape for _, norm in t.norms()] == [(B, T), (B, T)]


class OwnAttention(nn.Module):
    """A module that calls scaled_dot_product_attention with the arguments of a test."""

    def __init__(self, by_name=False):
        super().__init__()
        self.project = nn.Linear(M, 3 * M)
        self.by_name = by_name

    def forward(self, x, n_kv=H, **arguments):
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        function = scaled_dot_product_attention if self.by_name else F.scaled_dot_product_attention
        return function(q, k[:, :n_kv], v[:, :n_kv], **arguments).transpose(1, 2).flatten(-2)


ARGUMENTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(1)) < 0.6},
    "bool row": {"attn_mask": torch.tensor([True, True, False, True, True])[None, None, None]},
    "float": {"attn_mask": torch.randn(H, T, T, generator=torch.Generator().manual_seed(2))},
    "-inf": {"attn_mask": torch.full((T, T), -math.inf).triu(1)},
    "grouped": {"n_kv": 2, "enable_gqa": True},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_trace_sdpa_module_equals_output(name):
    arguments = ARGUMENTS[name]
    model = nn.Sequential(nn.Linear(M, M), OwnAttention()).double()
    x = torch.randn(B, T, M, dtype=torch.float64)
    arguments = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in arguments.items()}
    with torch.no_grad(), analysis.trace(model) as t:
        out = model[1](model[0](x), **arguments)
    assert t.paths == ["1"]
    weights = t.weights("1")
    torch.testing.assert_close(weights @ t.values("1"), out.unflatten(-1, (H, -1)).transpose(1, 2))
    assert t.difference("1") <= t.tolerance("1")
    torch.testing.assert_close(t.weights("1", heads=[3, 1], rows=[4]), weights[:, [3, 1]][:, :, [4]])
    if name in ("causal", "-inf"):
        assert (weights.triu(1) == 0).all()


def test_trace_fully_masked_query_has_zero_weights():
    model, mask = OwnAttention(), torch.zeros(T, T)
    mask[2] = -math.inf
    with torch.no_grad(), analysis.trace(model) as t:
        model(torch.randn(B, T, M), attn_mask=mask)
    weights = t.weights("")
    assert (weights[:, :, 2] == 0).all()
    torch.testing.assert_close(weights.sum(-1)[:, :, 3:], torch.ones(B, H, 2))


def test_trace_sdpa_imported_by_name():
    model = OwnAttention(by_name=True)
    with torch.no_grad(), analysis.trace(model) as t:
        model(torch.randn(B, T, M))
    assert t.weights("").shape == (B, H, T, T)
    assert scaled_dot_product_attention is F.scaled_dot_product_attention


def test_trace_sdpa_without_head_dimension():
    class OneHead(nn.Module):
        def forward(self, x, mask):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    model, x = OneHead(), torch.randn(B, T, M)
    mask = (torch.rand(B, T, T) < 0.5) | torch.eye(T, dtype=torch.bool)  # a different mask per sequence
    with analysis.trace(model) as t:
        out = model(x, mask)
    assert out.shape == (B, T, M)
    assert torch.equal(t.weights("")[:, 0] > 0, mask)
    torch.testing.assert_close((t.weights("") @ x[:, None])[:, 0], out)


@pytest.fixture(scope="module")
def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is an optional peer")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=M, n_head=H, n_layer=2, vocab_size=31, attn_implementation="sdpa")
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("padded", [False, True])
def test_trace_gpt2_equals_eager_attentions(gpt2, padded):
    ids = torch.randint(31, (B, 11))
    keep = torch.ones_like(ids)
    if padded:
        keep[1, :4] = 0
    with torch.no_grad():
        with analysis.trace(gpt2, "transformer.h.*.attn.weights", "transformer.h.*.output", "output") as t:
            logits = gpt2(ids, attention_mask=keep).logits
        gpt2.set_attn_implementation("eager")
        try:
            eager = gpt2(ids, attention_mask=keep, output_attentions=True, output_hidden_states=True)
        finally:
            gpt2.set_attn_implementation("sdpa")
    assert t.paths == ["transformer.h.0.attn", "transformer.h.1.attn"]
    rows = keep.bool()  # rows of padding are arbitrary
    for path, expected in zip(t.paths, eager.attentions, strict=True):
        torch.testing.assert_close(t.weights(path).transpose(1, 2)[rows], expected.transpose(1, 2)[rows])
        assert t.difference(path) <= t.tolerance(path)
    assert torch.equal(t.output(), logits)
    torch.testing.assert_close(t.output("transformer.h.0")[rows], eager.hidden_states[1][rows])
    assert [path for path, _ in t.norms()] == ["transformer.h.0", "transformer.h.1"]


def test_trace_gpt2_without_patterns_finds_attention(gpt2):
    with torch.no_grad(), analysis.trace(gpt2) as t:
        gpt2(torch.randint(31, (1, 7)))
    assert t.paths == ["transformer.h.0.attn", "transformer.h.1.attn"]


def test_zero_ablation_of_gpt2_head_equals_hook(gpt2):
    ids = torch.randint(31, (B, 11))
    layer = gpt2.transformer.h[1].attn

    def without_head_2(projection, args):
        heads = args[0].unflatten(-1, (H, -1)).clone()
        heads[..., 2, :] = 0
        return (heads.flatten(-2),)

    handle = layer.c_proj.register_forward_pre_hook(without_head_2)
    try:
        with torch.no_grad():
            expected = gpt2(ids).logits
    finally:
        handle.remove()
    with torch.no_grad(), analysis.trace(gpt2, "transformer.h.1.attn.weights") as t:
        t.intervene("transformer.h.1.attn", analysis.ZeroAblation(heads=[2]))
        logits = gpt2(ids).logits
    torch.testing.assert_close(logits, expected)
    # The difference compares the run without the intervention.
    assert t.difference("transformer.h.1.attn") <= t.tolerance("transformer.h.1.attn")
    assert (t.heads("transformer.h.1.attn")[:, 2] == 0).all()
    with torch.no_grad():
        assert (gpt2(ids).logits - logits).abs().max() > 1e-5


def test_trace_timm_vision_transformer_equals_unfused_weights():
    timm = pytest.importorskip("timm", reason="timm is an optional peer")
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=M, depth=2, num_heads=H, num_classes=5
    ).eval()
    fused, images = [block.attn.fused_attn for block in model.blocks], torch.randn(B, 3, 32, 32)
    assert all(fused)
    expected_weights = []
    with torch.no_grad():
        with analysis.trace(model) as t:
            model(images)
        for block in model.blocks:
            block.attn.fused_attn = False
            block.attn.attn_drop.register_forward_hook(lambda m, args, out: expected_weights.append(out))
        model(images)
    assert t.paths == ["blocks.0.attn", "blocks.1.attn"]
    for path, expected in zip(t.paths, expected_weights, strict=True):
        torch.testing.assert_close(t.weights(path), expected)
        assert t.difference(path) <= t.tolerance(path)


@pytest.mark.bad_input
def test_torch_layer_heads_and_modified_parameters_raise():
    layer = nn.MultiheadAttention(M, H, batch_first=True)
    x = torch.randn(B, T, M)
    with analysis.trace(layer) as t:
        layer(x, x, x)
    with pytest.raises(ConfigError, match="merges its heads before they can be recorded"):
        t.difference("", heads=2)
    with torch.no_grad():
        layer.in_proj_weight.mul_(2)
    with analysis.trace(layer) as t:
        layer(x, x, x)
    with torch.no_grad():
        layer.in_proj_weight.mul_(2)
    with pytest.raises(ConfigError, match="was modified in place since it was recorded"):
        t.weights("")


# ---------------------------------------------------------------------- attention that is written out


# ---------------------------------------------------------------------- unrecorded attention
