"""Activations by name, of one run of a model or of a pipeline and a text."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead import analysis
from clearhead.errors import ConfigError, DtypeError
from clearhead.models import DecoderConfig

IDS = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=2).build().eval()


def record_outputs(model, ids):
    """Return the outputs of all modules by path, from hooks."""
    outputs = {}
    handles = [
        module.register_forward_hook(lambda m, args, out, path=path: outputs.update({path: out}))
        for path, module in model.named_modules()
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return outputs


def test_run_with_cache_returns_output_and_all_activations(model):
    expected = record_outputs(model, IDS)
    logits, cache = analysis.run_with_cache(model, IDS)
    assert torch.equal(logits, expected[""])
    assert not logits.requires_grad
    for path, output in expected.items():
        name = f"{path}.output".lstrip(".")
        assert name in cache
        assert torch.equal(cache[name], output)
    attention = [name for name in cache if name.endswith(".weights")]
    assert attention == ["blocks.0.attention.weights", "blocks.1.attention.weights"]
    assert cache[attention[0]].shape == (2, 6, 7, 7)
    torch.testing.assert_close(cache[attention[0]].sum(-1), torch.ones(2, 6, 7))


def test_cache_name_without_ending_is_weights_or_output(model):
    _, cache = analysis.run_with_cache(model, {"ids": IDS}, "blocks.*.attention", "blocks.1", "blocks.1.input")
    assert torch.equal(cache["blocks.0.attention"], cache.weights("blocks.0.attention"))
    assert torch.equal(cache["blocks.1"], cache.output("blocks.1"))
    assert torch.equal(cache["blocks.1.input"], cache.input("blocks.1"))
    assert cache.names == [
        "blocks.0.attention.weights",
        "blocks.1.output",
        "blocks.1.input",
        "blocks.1.attention.weights",
    ]


@pytest.mark.bad_input
def test_cache_unrecorded_name_raises(model):
    _, cache = analysis.run_with_cache(model, IDS, "blocks.1")
    with pytest.raises(ConfigError, match=r"no output was recorded for blocks\.0; recorded: blocks\.1"):
        cache["blocks.0.output"]
    assert "blocks.0.output" not in cache


@pytest.mark.bad_input
def test_text_for_a_module_raises(model):
    with pytest.raises(DtypeError, match="got the text 'To be' for a Decoder, which has no tokenizer; pass a pipeline"):
        analysis.run_with_cache(model, "To be")


@pytest.fixture(scope="module")
def shakespeare():
    return ch.pipeline("shakespeare")


def test_pipeline_and_text_equal_model_and_ids(shakespeare):
    text = "To be, or"
    ids = torch.tensor([shakespeare.tokenizer.prompt(text)])
    model = shakespeare.model
    logits, cache = analysis.run_with_cache(shakespeare, text, "output")
    assert torch.equal(logits, analysis.run_with_cache(model, ids, "output")[0])
    assert cache.tokens == tuple(shakespeare.tokenizer.tokens(ids[0].tolist()))
    assert repr(cache).endswith("of 9 tokens: " + "|".join(cache.tokens))

    lens = analysis.logit_lens(shakespeare, text)
    assert torch.equal(lens.logits, analysis.logit_lens(model, ids).logits)
    assert lens.charts()[0].columns == list(cache.tokens)
    token = lens.to_dict(k=1)["layers"][-1]["predictions"][-1][0]
    assert token["token"] == shakespeare.tokenizer.tokens([token["id"]])[0]

    assert analysis.attribute(shakespeare, text).logit == analysis.attribute(model, ids).logit
    ablated = analysis.ablate(shakespeare, text, granularity="position", modules="blocks.1")
    plain = analysis.ablate(model, ids, granularity="position", modules="blocks.1")
    assert torch.equal(ablated.values, plain.values)
    assert ablated.charts()[0].columns == list(cache.tokens)


def test_patch_takes_two_texts(shakespeare):
    clean, corrupted = (torch.tensor([shakespeare.tokenizer.prompt(text)]) for text in ("To be", "To we"))
    result = analysis.patch(shakespeare, "To be", "To we")
    expected = analysis.patch(shakespeare.model, clean, corrupted)
    assert torch.equal(result.values, expected.values)
    assert result.charts()[0].columns == shakespeare.tokenizer.tokens(corrupted[0].tolist())


def test_trace_takes_a_pipeline(shakespeare):
    with analysis.trace(shakespeare, "output") as t:
        generated = shakespeare.generate("To be", max_new_tokens=2)
    assert t.runs == 1
    assert isinstance(generated, str)
