"""Our attention in models of transformers, by their own interface and under a mask: the numbers of their own."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.errors import ConfigError, MaskError
from clearhead.masks import causal, every, window
from tests.support.third_party_models import in_float64, shaken

transformers = pytest.importorskip("transformers")
ours = pytest.importorskip("clearhead.hub.transformers_backend")

T, V = 23, 61
SIZES = {"hidden_size": 24, "intermediate_size": 34, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": V}
LOCAL = window(3, 1) | every(5)


def made(name, implementation="sdpa"):
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
        model = shaken(kind(config(**sizes))).eval()
    model.set_attn_implementation(implementation)
    return model


def ids_of(seed=1):
    return torch.randint(1, V, (2, T), generator=torch.Generator().manual_seed(seed))


def outcome(model, **given):
    out = model(**given)[0]
    out.square().sum().backward()
    return [out, *(p.grad for p in model.parameters() if p.grad is not None)]


def same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


PADDED = torch.arange(T) < torch.tensor([[T], [T - 6]])
LEFT = PADDED.flip(1)
PACKED = torch.cat((torch.arange(9), torch.arange(T - 9))).expand(2, -1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert"])
@pytest.mark.parametrize("padding", [None, PADDED, LEFT], ids=["whole", "right", "left"])
def test_the_name_clearhead_gives_what_sdpa_gives(name, padding):
    given = {"input_ids": ids_of()} | ({} if padding is None else {"attention_mask": padding.long()})
    theirs, mine = (outcome(made(name, way), **given) for way in ("sdpa", "clearhead"))
    if padding is None:
        same(mine, theirs)
    else:
        torch.testing.assert_close(mine[0][padding], theirs[0][padding], rtol=1e-9, atol=1e-9)


def test_packed_sequences_are_documents():
    given = {"input_ids": ids_of(), "position_ids": PACKED, "use_cache": False}
    same(outcome(made("llama", "clearhead"), **given), outcome(made("llama"), **given))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_generation_writes_the_same(name):
    how = {"max_new_tokens": 12, "do_sample": False, "attention_mask": LEFT.long(), "pad_token_id": 0}
    theirs, mine = (made(name, way).generate(ids_of(), **how) for way in ("sdpa", "clearhead"))
    assert torch.equal(mine, theirs)


def test_a_window_costs_a_window(monkeypatch):
    """What a sliding window becomes is an expression, not a matrix."""
    seen = []
    attend = ours.attend_with_applied_masks
    monkeypatch.setattr(
        ours,
        "attend_with_applied_masks",
        lambda q, k, v, mask, **how: seen.append(mask) or attend(q, k, v, mask, **how),
    )
    made("mistral", "clearhead")(ids_of())
    assert [mask.count(T, T) for mask in seen] == 2 * [(causal() & window(6, 0)).count(T, T)]
    assert all(not mask.batch_shape for mask in seen)


@pytest.mark.parametrize("way", ["sdpa", "clearhead"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_under_a_mask_it_is_the_dense_mask(name, way):
    """What `under` gives, forward and backward, is what a dense mask of the same pairs gives."""
    allowed = LOCAL if name == "bert" else causal() & LOCAL
    dense = allowed.dense(T, T).expand(2, 1, T, T)
    wanted = outcome(made(name), input_ids=ids_of(), attention_mask=torch.where(dense, 0.0, -torch.inf).double())
    model = made(name, way)
    with ch.apply_mask(model, LOCAL):
        got = outcome(model, input_ids=ids_of())
    same(got, wanted)


@pytest.mark.parametrize("way", ["sdpa", "clearhead"])
@pytest.mark.parametrize("padding", [None, LEFT], ids=["whole", "left"])
def test_generation_under_a_mask_is_the_model_read_again_at_every_step(way, padding):
    model = made("llama", way)
    given = {} if padding is None else {"attention_mask": padding.long()}
    with ch.apply_mask(model, LOCAL):
        how = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
        cached = model.generate(ids_of(), **given, **how)
        again = model.generate(ids_of(), **given, **how, use_cache=False)
    assert torch.equal(cached, again)
    assert not torch.equal(cached, model.generate(ids_of(), **given, **how))


@pytest.mark.bad_input
class TestBadInput:
    def test_scores_that_attend_does_not_know(self):
        with pytest.raises(ConfigError, match="Gemma2Attention asks for softcap"):
            made("gemma2", "clearhead")(ids_of())

    def test_attention_written_by_hand(self):
        model = made("llama", "eager")
        with pytest.raises(ConfigError, match="attn_implementation='sdpa'"), ch.apply_mask(model, LOCAL):
            model(ids_of())

    def test_a_cache_with_empty_room(self):
        model = made("llama")
        how = {"max_new_tokens": 5, "cache_implementation": "static", "pad_token_id": 0}
        with pytest.raises(MaskError, match="preallocated cache"), ch.apply_mask(model, LOCAL):
            model.generate(ids_of(), **how)
