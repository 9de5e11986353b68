"""Keywords of other libraries raise a TypeError that names ours."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead import analysis, generation, hub, masks, models
from clearhead._core.keywords import CONVENTIONAL, explain_keywords
from clearhead.generation import BeamSearch, Sample
from clearhead.models import DecoderConfig, EncoderDecoderConfig
from clearhead.nn.positions import Rotary
from clearhead.training import TrainConfig, Trainer

pytestmark = pytest.mark.bad_input

SIZES = {"vocab_size": 11, "d_model": 12, "n_heads": 3, "n_layers": 1}
IDS = torch.tensor([[1, 2]])
Q = torch.zeros(1, 1, 2, 3)


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
        (lambda model: ch.pipeline("chat", model="shakespeare"), "pipeline has no keyword 'model'; use name"),
        (lambda model: ch.attend(Q, Q, Q, attn_mask=None), "attend has no keyword 'attn_mask'; use mask"),
        (lambda model: ch.attend(Q, Q, Q, attention_mask=None), "use mask"),
        (lambda model: ch.attend(Q, Q, Q, is_causal=True), r"use mask=masks\.causal\(\)"),
        (lambda model: ch.attend(Q, Q, Q, scale=0.5), "use scores=Scaled"),
        (lambda model: ch.Decoder(n_layer=2), "Decoder has no keyword 'n_layer'; use n_layers in its configuration"),
        (lambda model: models.gpt2(n_embd=8), r"gpt2 has no keyword 'n_embd'; use gpt2\(\)\.replace\(d_model=…\)"),
        (lambda model: ch.train("text", learning_rate=1e-3), "use overrides={'lr_max': …}"),
        (lambda model: ch.train("text", num_train_epochs=1), "use overrides={'epochs': …}"),
        (lambda model: TrainConfig(lr=1e-3), r"use schedule=WarmupCosine\(lr_max=…\)"),
        (lambda model: TrainConfig(max_steps=3), "TrainConfig has no keyword 'max_steps'; use steps"),
        (lambda model: ch.trace(model, output_attentions=True), "use clearhead.trace"),
        (lambda model: ch.check(model, attention_mask=None), "check has no keyword 'attention_mask'; use mask"),
        (lambda model: ch.cost(model, batch_size=2), "use batch"),
        (lambda model: ch.apply_mask(model, attention_mask=None), "use mask"),
        (lambda model: analysis.run_with_cache(model, IDS, names_filter="x"), "use patterns"),
        (lambda model: generation.LogitsProcessors(repetition_penalt=2.0), "did you mean 'repetition_penalty'"),
        (lambda model: ch.save(model, save_directory="folder"), "use folder"),
        (lambda model: ch.attend(Q, Q, Q, causal=True), r"use mask=masks\.causal\(\)"),
        (lambda model: ch.attend(Q, Q, Q, window_size=4), r"use mask=masks\.window\(before, after\)"),
        (lambda model: ch.attend(Q, Q, Q, softcap=4.0), r"use scores=SoftCapped\(cap\)"),
        (lambda model: ch.attend(Q, Q, Q, score_mod=None), "use bias=…"),
        (lambda model: ch.generate(model, IDS, seed=1), r"use strategy=Sample\(seed=…\)"),
        (lambda model: ch.generate(model, IDS, length_penalty=1.0), r"use strategy=BeamSearch\(width, length_penalty"),
        (lambda model: ch.generate(model, IDS, no_repeat_ngram_size=2), "use logits_processors=LogitsProcessors"),
        (lambda model: ch.generate(model, IDS, streamer=None), "use stream, which yields each token"),
        (lambda model: model.config.replace(n_embd=2), r"DecoderConfig\.replace has no keyword 'n_embd'; use d_model"),
        (lambda model: DecoderConfig(**SIZES, rms_norm_eps=1e-6), r"use norm=RMSNorm\(eps=…\)"),
        (lambda model: DecoderConfig(**SIZES, rope_theta=1e4), r"use positions=Rotary\(base=…\)"),
        (lambda model: models.gpt2(n_layers=2), r"use gpt2\(\)\.replace\(n_layers=…\)"),
        (lambda model: ch.train("text", weight_decay=0.1), "use overrides={'weight_decay': …}"),
        (lambda model: Trainer(args=None), "Trainer has no keyword 'args'; expected one of: config"),
        (lambda model: ch.check(model, is_causal=True), "use causal"),
        (lambda model: ch.check(model, vocab_size=11), r"use inputs=Ids\(vocab_size\)"),
        (lambda model: ch.MultiHeadAttention(12, 3, batch_first=True), "the only layout"),
        (lambda model: masks.window(left=2, right=3), "window has no keyword 'left'; use before"),
        (lambda model: masks.padding(attention_mask=IDS), "padding has no keyword 'attention_mask'; use lengths"),
        (lambda model: masks.documents(cu_seqlens=IDS), "use ids"),
        (lambda model: masks.every(stride=3), "use step"),
        (lambda model: masks.blocks(block_size=3), "use size"),
        (lambda model: masks.from_function(mask_mod=None), "use function"),
        (lambda model: ch.ZeroAblation(head=3), "use heads"),
        (lambda model: generation.Greedy(temperature=0.5), r"use Sample\(temperature=…\)"),
        (lambda model: Rotary(theta=1e4), "use base"),
        (lambda model: hub.export(model, save_directory="folder"), "use folder"),
        (lambda model: models.load_checkpoint("folder", map_location="cpu"), "use device"),
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


def test_unknown_keyword_of_a_configuration_lists_its_fields_only():
    with pytest.raises(TypeError) as error:
        TrainConfig(zzz=1)
    assert "renamed_fields" not in str(error.value)
    assert "weight_decay" in str(error.value)


def test_conventional_keywords_are_not_their_own_replacement():
    assert all(keyword not in alternatives for keyword, alternatives in CONVENTIONAL.items())
