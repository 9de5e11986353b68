"""Logits processors from generation_config.json, compared with transformers' `generate` on tiny random models."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch

from clearhead.errors import ConfigError, StorageError
from clearhead.generation import BeamSearch, LogitsProcessors, Sample, generate, stream
from clearhead.hub import checkpoint
from clearhead.hub.generation_settings import read_generation_settings
from tests.hub.conftest import change_json
from tests.support.third_party_models import BART, PEERS

NEW = 8
PROMPT = torch.tensor([[5, 3, 11, 5, 3]])
# Each must change the output, which the test asserts; ids are taken from the output of the reference models.
SETTINGS = {
    "penalty": {"repetition_penalty": 1.7},
    "runs": {"no_repeat_ngram_size": 2},
    "no id twice": {"no_repeat_ngram_size": 1},
    "words": {"bad_words_ids": [["first"], ["second", "third"], [7, 8, 9]]},
    "long": {"min_length": 9, "eos_token_id": ["first", "second"]},
    "long enough": {"min_new_tokens": 4, "eos_token_id": ["first"]},
    "end": {"forced_eos_token_id": [13]},
    "suppressed": {"suppress_tokens": ["first", "third"]},
    "suppressed first": {"begin_suppress_tokens": ["first"]},
    "first": {"forced_bos_token_id": 17, "begin_suppress_tokens": ["second"]},
    "all": {
        "repetition_penalty": 0.8,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [["second"]],
        "min_new_tokens": 3,
        "eos_token_id": ["third", 4],
        "forced_eos_token_id": 4,
        "suppress_tokens": [9, 10],
    },
}


def with_ids(settings, ids):
    """Return settings with names replaced by ids."""
    names = dict(zip(("first", "second", "third"), ids, strict=False))
    if isinstance(settings, dict):
        return {key: with_ids(item, ids) for key, item in settings.items()}
    return [with_ids(item, ids) for item in settings] if isinstance(settings, list) else names.get(settings, settings)


@pytest.fixture(scope="module", params=["llama", "bart"])
def models(request, tmp_path_factory):
    """The reference model, clearhead's, and the folder."""
    peer = PEERS[request.param]
    torch.manual_seed(7)
    reference = type(peer)(peer.model, peer.config, {**peer.sizes, "max_position_embeddings": 40}).build()
    folder = tmp_path_factory.mktemp("limits") / "model"
    peer.save(reference, folder)
    return reference, checkpoint.load_third_party(folder), folder


def reference_ids(reference, **settings):
    """Return the new ids of transformers with only these settings."""
    from transformers import GenerationConfig

    reference.generation_config = GenerationConfig(
        eos_token_id=settings.pop("eos_token_id", None), pad_token_id=0, decoder_start_token_id=2, **settings
    )
    out = reference.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=NEW, do_sample=False)[0]
    return out[1 if reference.config.is_encoder_decoder else PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_ids_match_transformers(models, name):
    reference, model, folder = models
    unconstrained = reference_ids(reference)
    settings = with_ids(
        SETTINGS[name], list(dict.fromkeys([*unconstrained, *reference_ids(reference, no_repeat_ngram_size=1)]))
    )
    expected = reference_ids(reference, **copy.deepcopy(settings))
    if name != "first" or reference.config.is_encoder_decoder:
        assert expected != unconstrained, "the settings change nothing"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None, **settings}))
    source = checkpoint.open_checkpoint(folder)
    settings_read = read_generation_settings(source)
    start = {"decoder_start_ids": settings_read.decoder_start_ids} if reference.config.is_encoder_decoder else {}
    options = {
        "logits_processors": settings_read.logits_processors,
        "stop_ids": settings_read.stop_ids,
        "max_new_tokens": NEW,
        **start,
    }
    assert options["logits_processors"] is not None
    generated = generate(model, PROMPT, **options)
    assert generated.sequence(0, with_stop=True).tolist() == expected
    assert [int(step.ids[0]) for step in stream(model, PROMPT, **options)] == expected
    assert generate(model, PROMPT, **options, use_cache=False).sequence(0, with_stop=True).tolist() == expected
    # Rows of other lengths in the batch change nothing, nor does a beam of width 1.
    together = generate(model, [[4], PROMPT[0].tolist(), [9, 9, 9, 9, 9, 9, 2]], **options)
    assert together.sequence(1, with_stop=True).tolist() == expected
    assert generate(model, PROMPT, strategy=BeamSearch(1), **options).sequence(0, with_stop=True).tolist() == expected


def test_sampling_and_beam_search_apply_processors(models):
    _, model, _ = models
    start = {"decoder_start_ids": 2} if hasattr(model, "encoder") else {}
    processors = LogitsProcessors(suppress_tokens=tuple(range(2, 29)), no_repeat_ngram_size=2)
    for strategy in (Sample(seed=1, temperature=3.0), BeamSearch(3, n_best=2)):
        ids = (
            generate(model, PROMPT, strategy=strategy, max_new_tokens=5, logits_processors=processors, **start)
            .sequence(0)
            .tolist()
        )
        assert set(ids) <= {0, 1, 29, 30}
        pairs = list(itertools.pairwise(ids))
        assert len(set(pairs)) == len(pairs)


def test_missing_generation_config_falls_back_to_config(saved_peer):
    _, folder = saved_peer("bart")
    (folder / "generation_config.json").unlink()
    source = checkpoint.open_checkpoint(folder)
    settings = read_generation_settings(source)
    assert settings.logits_processors == LogitsProcessors(forced_eos_token_ids=(BART["forced_eos_token_id"],))
    assert settings.decoder_start_ids == (BART["decoder_start_token_id"],)


@pytest.mark.bad_input
def test_unsupported_or_invalid_settings_raise(llama):
    file = llama / "generation_config.json"
    for settings, message in (
        ({"guidance_scale": 2.0}, "guidance_scale 2.0"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"suppress_tokens": "all"}, "suppress_tokens"),
        ({"bad_words_ids": [["a"]]}, "bad_words_ids"),
    ):
        change_json(file, **settings)
        with pytest.raises(StorageError, match=message):
            read_generation_settings(checkpoint.open_checkpoint(llama))
        change_json(file, **dict.fromkeys(settings))
    with pytest.raises(ConfigError, match="no_repeat_ngram_size is -1"):
        LogitsProcessors(no_repeat_ngram_size=-1)
    with pytest.raises(ConfigError, match="token id 31 in the logits processors is outside the vocabulary"):
        generate(
            checkpoint.load_third_party(llama),
            PROMPT,
            logits_processors=LogitsProcessors(suppress_tokens=(30, 31)),
            max_new_tokens=2,
        )
