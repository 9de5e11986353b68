"""generation_config.json: its settings apply by default, as in transformers, and unknown keys are rejected."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead import hub
from clearhead.errors import DataError, StorageError
from clearhead.generation import BeamSearch, Greedy, LogitsProcessors, Sample
from clearhead.hub import checkpoint
from clearhead.hub.generation_settings import GenerationSettings, read_generation_settings
from clearhead.hub.text_generation import decode_suffix
from tests.hub.conftest import change_json
from tests.support.third_party_models import PEERS
from tests.support.tokenizers import word_piece

TEXTS = ["the quick brown fox", "dog", "the lazy dog the"]


@pytest.fixture(scope="module", params=["llama", "bart"])
def saved(request, tmp_path_factory):
    """A model of transformers with a tokenizer, and its folder."""
    inner, specials = word_piece()
    folder = tmp_path_factory.mktemp("settings")
    peer = PEERS[request.param]
    sizes = peer.sizes | {"vocab_size": inner.get_vocab_size(), "max_position_embeddings": 60}
    torch.manual_seed(4)
    reference = replace(peer, sizes=sizes).build()
    reference.save_pretrained(folder)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))
    return reference, folder


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 9},
        {"max_length": 12},
        {"num_beams": 3, "max_new_tokens": 9},
        {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "max_new_tokens": 9},
        {"num_beams": 2, "early_stopping": "never", "repetition_penalty": 1.4, "max_length": 13},
    ],
    ids=str,
)
def test_settings_of_the_model_apply_as_in_transformers(saved, settings):
    reference, folder = saved
    special = {"eos_token_id": 3, "pad_token_id": 0, "decoder_start_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings | special))
    trained = hub.pipeline(folder, dtype=torch.float64)
    for text in TEXTS:
        expected = text_of_transformers(reference, trained, text, settings | special)
        assert trained.generate(text) == expected
        assert ch.generate(trained, text) == expected
    # A given strategy replaces the strategy of the settings, but not the penalty.
    penalty = {key: value for key, value in settings.items() if key == "repetition_penalty"}
    first = text_of_transformers(reference, trained, TEXTS[0], special | penalty | {"max_new_tokens": 1})
    assert trained.generate(TEXTS[0], strategy=Greedy(), max_new_tokens=1) == first


def text_of_transformers(reference, trained, text, settings):
    """Return the text that transformers generates under these settings, as a pipeline would return it."""
    from transformers import GenerationConfig

    reference.generation_config = GenerationConfig(**copy.deepcopy(settings))
    ids = torch.tensor([trained.tokenizer.prompt(text)])
    generated = reference.generate(ids, attention_mask=torch.ones_like(ids))[0]
    new_ids = generated[1 if reference.config.is_encoder_decoder else ids.shape[1] :].tolist()
    new_ids = [id_ for id_ in new_ids if id_ not in (0, 3)]  # neither padding nor the end
    if reference.config.is_encoder_decoder:
        return trained.tokenizer.decode(new_ids).strip()
    return decode_suffix(trained, ids[0].tolist(), new_ids)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, GenerationSettings()),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "typical_p": 0.5}, GenerationSettings()),
        ({"do_sample": True}, GenerationSettings(Sample(top_k=50))),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.1},
            GenerationSettings(Sample(temperature=0.6, top_p=0.9, min_p=0.1)),
        ),
        ({"num_beams": 4}, GenerationSettings(BeamSearch(4))),
        ({"max_length": 20, "max_new_tokens": 5}, GenerationSettings(max_length=20, max_new_tokens=5)),
        (
            {"min_length": 9, "min_new_tokens": 2},
            GenerationSettings(logits_processors=LogitsProcessors(min_new_tokens=2)),
        ),
        (
            {"eos_token_id": [2, 3], "renormalize_logits": True, "use_cache": False, "transformers_version": "5"},
            GenerationSettings(stop_ids=(2, 3), logits_processors=LogitsProcessors(renormalize_logits=True)),
        ),
    ],
    ids=str,
)
def test_keys_are_read_as_settings(llama, keys, expected):
    change_json(llama / "config.json", bos_token_id=None, eos_token_id=None)
    (llama / "generation_config.json").write_text(json.dumps(keys))
    assert read_generation_settings(checkpoint.open_checkpoint(llama)) == expected


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"chat_format": "chatml"}, r"generation_config\.json has 'chat_format': 'chatml', which is not known"),
        ({"penalty_alpha": 0.6}, "requires penalty_alpha 0.6"),
        ({"num_beams": 4, "do_sample": True}, "num_beams is 4 and do_sample is True"),
        ({"do_sample": True, "typical_p": 0.5}, "requires typical_p 0.5"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"max_length": "long"}, "max_length is 'long'"),
        ({"early_stopping": "soon", "num_beams": 2}, "early_stopping is 'soon'"),
        ({"alignment_heads": [[1, 2]]}, "alignment_heads"),
    ],
    ids=str,
)
def test_unknown_or_unsupported_keys_are_rejected_by_name(llama, keys, message):
    (llama / "generation_config.json").write_text(json.dumps(keys))
    with pytest.raises(StorageError, match=message):
        read_generation_settings(checkpoint.open_checkpoint(llama))


@pytest.mark.bad_input
def test_prompt_that_reaches_the_largest_length_raises():
    settings = GenerationSettings(max_length=5)
    assert settings.new_tokens(3, None) == 2
    assert settings.new_tokens(9, 4) == 4
    with pytest.raises(DataError, match="the prompt has 5 tokens and the model's own max_length is 5"):
        settings.new_tokens(5, None)


def test_summarize_uses_the_settings_and_the_prefix_of_the_task(saved):
    reference, folder = saved
    if not reference.config.is_encoder_decoder:
        pytest.skip("a decoder")
    (folder / "generation_config.json").write_text('{"eos_token_id": 3, "decoder_start_token_id": 2}')
    task = {"summarization": {"prefix": "the quick ", "num_beams": 3, "max_length": 7}}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"task_specific_params": task}))
    trained = hub.pipeline(folder, dtype=torch.float64)
    expected = trained.translate("the quick brown fox", strategy=BeamSearch(3), max_new_tokens=6)
    assert trained.summarize("brown fox") == expected
    assert trained.summarize(["brown fox"]) == [expected]
