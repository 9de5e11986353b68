"""The "clearhead" attention of transformers and `apply_mask` on its models: the same outputs as with sdpa."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.errors import ConfigError, MaskError
from clearhead.masks import causal, every, window
from tests.support.reference_models import in_float64, perturbed

transformers = pytest.importorskip("transformers")
backend = pytest.importorskip("clearhead.hub.transformers_backend")

T, V = 23, 61
SIZES = {"hidden_size": 24, "intermediate_size": 34, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": V}
LOCAL = window(3, 1) | every(5)


def build(name, implementation="sdpa"):
    """A tiny model of transformers, the same at each call."""
    grouped = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
    kinds = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, grouped),
        "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, grouped | {"sliding_window": 7}),
        "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config, grouped | {"head_dim": 6}),
        "gpt2": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config,
            {"n_embd": 24, "n_head": 4, "n_layer": 2, "vocab_size": V},
        ),
        "bert": (transformers.BertModel, transformers.BertConfig, SIZES),
    }
    kind, config, sizes = kinds[name]
    torch.manual_seed(0)
    with in_float64():
        model = perturbed(kind(config(**sizes))).eval()
    model.set_attn_implementation(implementation)
    return model


def ids_of(seed=1):
    return torch.randint(1, V, (2, T), generator=torch.Generator().manual_seed(seed))


def output_and_gradients(model, **inputs):
    """Return the output and all parameter gradients."""
    out = model(**inputs)[0]
    out.square().sum().backward()
    return [out, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_close(actual, expected):
    """Assert equality of two lists of tensors up to rounding."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


PADDED = torch.arange(T) < torch.tensor([[T], [T - 6]])
LEFT_PADDED = PADDED.flip(1)
PACKED = torch.cat((torch.arange(9), torch.arange(T - 9))).expand(2, -1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert"])
@pytest.mark.parametrize("padding", [None, PADDED, LEFT_PADDED], ids=["unpadded", "right", "left"])
def test_clearhead_attention_matches_sdpa(name, padding):
    inputs = {"input_ids": ids_of()} | ({} if padding is None else {"attention_mask": padding.long()})
    expected, actual = (
        output_and_gradients(build(name, implementation), **inputs) for implementation in ("sdpa", "clearhead")
    )
    if padding is None:
        assert_close(actual, expected)
    else:
        torch.testing.assert_close(actual[0][padding], expected[0][padding], rtol=1e-9, atol=1e-9)


def test_packed_sequences_match_sdpa():
    inputs = {"input_ids": ids_of(), "position_ids": PACKED, "use_cache": False}
    assert_close(
        output_and_gradients(build("llama", "clearhead"), **inputs), output_and_gradients(build("llama"), **inputs)
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_generation_matches_sdpa(name):
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": LEFT_PADDED.long(), "pad_token_id": 0}
    expected, actual = (
        build(name, implementation).generate(ids_of(), **options) for implementation in ("sdpa", "clearhead")
    )
    assert torch.equal(actual, expected)


def test_sliding_window_becomes_a_mask_expression(monkeypatch):
    masks = []
    attend = backend.attend_with_applied_masks
    monkeypatch.setattr(
        backend,
        "attend_with_applied_masks",
        lambda q, k, v, mask, **options: masks.append(mask) or attend(q, k, v, mask, **options),
    )
    build("mistral", "clearhead")(ids_of())
    assert [mask.count(T, T) for mask in masks] == 2 * [(causal() & window(6, 0)).count(T, T)]
    assert all(not mask.batch_shape for mask in masks)


@pytest.mark.parametrize("implementation", ["sdpa", "clearhead"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_apply_mask_equals_dense_mask(name, implementation):
    """Forward and backward."""
    allowed = LOCAL if name == "bert" else causal() & LOCAL
    dense = allowed.dense(T, T).expand(2, 1, T, T)
    expected = output_and_gradients(
        build(name), input_ids=ids_of(), attention_mask=torch.where(dense, 0.0, -torch.inf).double()
    )
    model = build(name, implementation)
    with ch.apply_mask(model, LOCAL):
        actual = output_and_gradients(model, input_ids=ids_of())
    assert_close(actual, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "clearhead"])
@pytest.mark.parametrize("padding", [None, LEFT_PADDED], ids=["unpadded", "left"])
def test_cached_generation_with_applied_mask_equals_uncached(implementation, padding):
    model = build("llama", implementation)
    inputs = {} if padding is None else {"attention_mask": padding.long()}
    with ch.apply_mask(model, LOCAL):
        options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
        cached = model.generate(ids_of(), **inputs, **options)
        uncached = model.generate(ids_of(), **inputs, **options, use_cache=False)
    assert torch.equal(cached, uncached)
    assert not torch.equal(cached, model.generate(ids_of(), **inputs, **options))


@pytest.mark.bad_input
class TestBadInput:
    def test_soft_capped_scores_raise(self):
        with pytest.raises(ConfigError, match="Gemma2Attention uses softcap"):
            build("gemma2", "clearhead")(ids_of())

    def test_apply_mask_on_eager_attention_raises(self):
        model = build("llama", "eager")
        with pytest.raises(ConfigError, match="attn_implementation='sdpa'"), ch.apply_mask(model, LOCAL):
            model(ids_of())

    def test_apply_mask_with_preallocated_cache_raises(self):
        model = build("llama")
        options = {"max_new_tokens": 5, "cache_implementation": "static", "pad_token_id": 0}
        with pytest.raises(MaskError, match="preallocated cache"), ch.apply_mask(model, LOCAL):
            model.generate(ids_of(), **options)
