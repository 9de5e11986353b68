"""Third-party modules: parameters and FLOPs equal those that torch counts in a real execution."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from clearhead.analysis.cost import cost
from clearhead.analysis.inputs.example import example
from clearhead.analysis.inputs.module_spec import Embeddings, Values
from clearhead.errors import ConfigError, ShapeError

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

SHAPES = ((2, 7, 5), (3, 13, 11), (5, 19, 17))  # batch, source, target: primes
EAGER = {"attn_implementation": "eager"}  # plain products, which torch counts on a CPU
SMALL = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6} | EAGER


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=6, vocab_size=101, bos_token_id=0, eos_token_id=0, **EAGER
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=101))


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=101))


def t5():
    config = transformers.T5Config(d_model=24, d_kv=4, d_ff=37, num_layers=2, num_heads=6, vocab_size=101, **EAGER)
    return transformers.T5ForConditionalGeneration(config)


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=28, patch_size=7))


def whisper():
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "num_mel_bins": 13, "max_source_positions": 31}
    ids = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2, "vocab_size": 101}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **heads, **ids, **EAGER))


def timm_vit():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=6)
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 6, 37, batch_first=True), 2)


PAIRS = ("t5",)
FIXED = ("vit", "timm_vit")
MODELS = {f.__name__: f for f in (gpt2, llama, bert, t5, vit, whisper, timm_vit)}


def counted(model, tokens, batch):
    sample = example(model, "it", tokens=tokens, batch=batch)
    model.eval()
    with FlopCounterMode(display=False) as counter:
        loss = sample.loss(model)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("name", MODELS)
def test_cost_third_party_model_equals_counted_flops(name):
    model = MODELS[name]()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for batch, source, target in SHAPES:
        tokens = None if name in FIXED else (source, target) if name in PAIRS else target
        prediction = cost(model, tokens=tokens, batch=batch, training=True)
        assert prediction.parameters.value == sum(p.numel() for p in model.parameters())
        assert (prediction.forward.value, prediction.backward.value) == counted(model, tokens, batch)
        assert not prediction.unknown_ops
        assert not any(p.grad is not None and type(p.grad).__name__ == "FakeTensor" for p in model.parameters())


def test_cost_torch_encoder_equals_formula():
    model = encoder()
    for batch, _, tokens in SHAPES:
        prediction = cost(model, tokens=tokens, batch=batch)
        assert prediction.parameters.value == sum(p.numel() for p in model.parameters())
        # A layer: four projections and the feed-forward, and two products of the attention.
        assert prediction.forward.value == 2 * (
            8 * batch * tokens * 24**2 + 4 * batch * tokens * 24 * 37 + 4 * batch * tokens**2 * 24
        )
        assert prediction.forward.formula.free_symbols  # B, L and T


def test_cost_mixture_of_experts_charges_experts_per_token():
    config = {**SMALL, "intermediate_size": 40, "num_key_value_heads": 2, "vocab_size": 101, "num_local_experts": 5}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config, num_experts_per_tok=3))
    for batch, _, tokens in SHAPES:
        prediction = cost(model, tokens=tokens, batch=batch, dtype=torch.bfloat16)
        assert prediction.parameters.value == sum(p.numel() for p in model.parameters())
        rows = batch * tokens
        layer = 2 * rows * 24 * (24 + 8 + 8 + 24) + 4 * batch * 24 * tokens**2 + 2 * rows * 24 * 5
        experts = 3 * rows * 3 * 2 * 24 * 40  # three of five, each of three matrices
        rotary = 4 * tokens  # angles: positions times frequencies
        assert prediction.forward.value == 2 * (layer + experts) + 2 * rows * 24 * 101 + rotary


def test_cost_length_beyond_model_raises_shape_error():
    with pytest.raises(ShapeError, match="more than the 1024 learned positions"):
        cost(gpt2(), tokens=1025)


# ---------------------------------------------------------------------- custom operators and user files


@torch.library.custom_op("costs_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("costs_test::with_formula", mutates_args=())
def with_formula(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@with_formula.register_fake
def _(x):
    return torch.empty_like(x)


@register_flop_formula(torch.ops.costs_test.with_formula)
def _(x_shape, *args, out_shape=None, **kwargs):
    return 7 * x_shape[0]


class Custom(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.operator, self.linear = operator, nn.Linear(13, 7)

    def forward(self, x):
        return self.linear(self.operator(x))


def test_cost_unknown_operator_is_reported_and_bytes_counted():
    prediction = cost(Custom(lambda x: twice(x)), tokens=5, batch=3)
    assert prediction.unknown_ops == {"costs_test::twice": 1}
    part = next(part for part in prediction.parts if part.name == "Custom")
    assert part.bytes_accessed.value == 2 * 3 * 5 * 13 * 4
    assert prediction.forward.value == 2 * 3 * 5 * 13 * 7
    assert prediction.to_dict()["unknown_ops"] == {"costs_test::twice": 1}


def test_cost_operator_with_torch_formula_is_counted():
    prediction = cost(Custom(lambda x: with_formula(x)), inputs=Embeddings(13), tokens=5, batch=3)
    assert not prediction.unknown_ops
    assert prediction.forward.value == 2 * 3 * 5 * 13 * 7 + 7 * 3


class DataDependent(nn.Module):
    def forward(self, x):
        return x[x > 0].sum() if x.sum() > 1 else x.mean()


@pytest.mark.bad_input
def test_cost_data_dependent_module_raises_with_operator_and_line():
    with pytest.raises(ConfigError, match=r"_local_scalar_dense.*test_third_party\.py:\d+ \(return x\[x > 0\]"):
        cost(DataDependent(), inputs=Values((3,)), batch=2)


def test_cost_failing_module_raises_with_line():
    with pytest.raises(ConfigError, match=r"Linear failed with these inputs: .*reduction dim"):
        cost(nn.Linear(5, 7), inputs=torch.randn(3, 4))


def test_command_factory_in_user_file(tmp_path, monkeypatch, run):
    (tmp_path / "user_models.py").write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn

            def small():
                return nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 3))

            def with_inputs():
                return nn.Conv1d(3, 5, 7), torch.empty(2, 3, 31, device="meta")
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    small = parsed(run("user_models:small", "--tokens", "11", "--batch", "2", "--json"))
    assert small["parameters"]["value"] == 13 * 7 + 7 + 7 * 3 + 3
    assert small["flops"]["forward"]["value"] == 2 * 2 * 11 * (13 * 7 + 7 * 3)
    convolution = parsed(run("user_models:with_inputs", "--json"))
    assert convolution["flops"]["forward"]["value"] == 2 * 2 * 25 * 3 * 5 * 7
    assert run("user_models:none")[2].startswith("clearhead: user_models has no 'none'")
    sys.modules.pop("user_models")


def parsed(result):
    status, out, error = result
    assert status == 0, error
    return json.loads(out)
