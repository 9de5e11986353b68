"""Keywords of other libraries raise a TypeError that names ours."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead import generation, hub
from clearhead._core.keywords import CONVENTIONAL, explain_keywords
from clearhead.generation import BeamSearch, Sample
from clearhead.models import DecoderConfig, EncoderDecoderConfig

pytestmark = pytest.mark.bad_input

SIZES = {"vocab_size": 11, "d_model": 12, "n_heads": 3, "n_layers": 1}
IDS = torch.tensor([[1, 2]])


@pytest.fixture(scope="module")
def decoder():
    return DecoderConfig(**SIZES).build()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model: ch.generate(model, IDS, num_beams=4),
            "generate has no keyword 'num_beams'; use strategy=Bea",
        ),
        (lambda model: ch.generate(model, IDS, do_sample=True), r"use strategy=Sample\(…\)"),
        (lambda model: ch.generate(model, IDS, max_length=9), "use max_new_tokens"),
        (lambda model: ch.generate(model, IDS, eos_token_id=9), "use stop_ids"),
        (lambda model: ch.generate(model, IDS, strateg=9), "did you mean 'strategy'"),
        (lambda model: generation.stream(model, IDS, temperature=0.5), r"use strategy=Sample\(temperature=…\)"),
        (lambda model: BeamSearch(num_beams=4), "BeamSearch has no keyword 'num_beams'; use width"),
        (lambda model: BeamSearch(num_return_sequences=4), "use n_best"),
        (lambda model: Sample(top_q=0.5), "did you mean"),
        (
            lambda model: DecoderConfig(**SIZES, hidden_size=8),
            "Config has no keyword 'hidden_size'; use d_model",
        ),
        (lambda model: DecoderConfig(**SIZES, n_layer=8), "use n_layers"),
        (lambda model: EncoderDecoderConfig(vocab_size=3, num_attention_heads=8), "use n_heads"),
        (lambda model: model(IDS, attention_mask=IDS), "use mask"),
        (lambda model: model(IDS, past_key_values=None), "use cache"),
        (lambda model: ch.MultiHeadAttention(12, num_heads=3), "use n_heads"),
        (lambda model: ch.MultiHeadAttention(12, 3)(torch.ones(1, 2, 12), attn_mask=None), "use mask"),
        (lambda model: hub.pipeline("shakespeare", torch_dtype=None), "use dtype"),
        (lambda model: ch.load("shakespeare", device_map="auto"), "use device"),
    ],
)
def test_conventional_keyword_raises_type_error_that_names_ours(decoder, call, message):
    with pytest.raises(TypeError, match=message):
        call(decoder)


def test_pipeline_methods_name_our_keywords():
    bard = hub.pipeline("shakespeare")
    with pytest.raises(TypeError, match=r"Pipeline\.generate has no keyword 'max_tokens'; use max_new_tokens"):
        bard.generate("x", max_tokens=3)
    with pytest.raises(TypeError, match="use strategy=Sample"):
        bard.stream("x", top_p=0.5)


def test_explain_keywords_keeps_signature_and_result():
    @explain_keywords
    def add(a: int, *, b: int = 2) -> int:
        """Add."""
        return a + b

    assert add(1, b=4) == 5
    assert add.__doc__ == "Add."
    with pytest.raises(TypeError, match="add has no keyword 'c'; expected one of: a, b"):
        add(1, c=3)


def test_conventional_keywords_are_not_their_own_replacement():
    assert all(keyword not in alternatives for keyword, alternatives in CONVENTIONAL.items())
