"""What is forced and forbidden in generation, against transformers' own `generate` on tiny random models."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch

from clearhead.errors import ConfigError, StorageError
from clearhead.generation import BeamSearch, LogitsProcessors, Sample, generate, stream
from clearhead.hub import checkpoint, tokenizer_files
from tests.hub.conftest import change_json
from tests.support.third_party_models import BART, PEERS

NEW = 8
PROMPT = torch.tensor([[5, 3, 11, 5, 3]])
# Each must change what is written, which the test makes sure of; ids are chosen from what the peers write.
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


def filled(settings, written):
    """Settings with words for ids replaced by ids that a model writes."""
    names = dict(zip(("first", "second", "third"), written, strict=False))
    if isinstance(settings, dict):
        return {key: filled(item, written) for key, item in settings.items()}
    return [filled(item, written) for item in settings] if isinstance(settings, list) else names.get(settings, settings)


@pytest.fixture(scope="module", params=["llama", "bart"])
def both(request, tmp_path_factory):
    """The maker's model, ours, what both go on from, and the folder."""
    peer = PEERS[request.param]
    torch.manual_seed(7)
    theirs = type(peer)(peer.model, peer.config, {**peer.sizes, "max_position_embeddings": 40}).build()
    folder = tmp_path_factory.mktemp("limits") / "model"
    peer.save(theirs, folder)
    return theirs, checkpoint.load_third_party(folder), folder


def written_by(theirs, **settings):
    """transformers' new ids, with nothing set but these settings."""
    from transformers import GenerationConfig

    theirs.generation_config = GenerationConfig(
        eos_token_id=settings.pop("eos_token_id", None), pad_token_id=0, decoder_start_token_id=2, **settings
    )
    out = theirs.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=NEW, do_sample=False)[0]
    return out[1 if theirs.config.is_encoder_decoder else PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_ids_are_those_of_transformers(both, name):
    theirs, ours, folder = both
    free = written_by(theirs)
    settings = filled(SETTINGS[name], list(dict.fromkeys([*free, *written_by(theirs, no_repeat_ngram_size=1)])))
    wanted = written_by(theirs, **copy.deepcopy(settings))
    if name != "first" or theirs.config.is_encoder_decoder:
        assert wanted != free, "the settings change nothing, so the test would say nothing"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None, **settings}))
    source = checkpoint.open_checkpoint(folder)
    start = {"decoder_start_ids": tokenizer_files.decoder_start_ids(source)} if theirs.config.is_encoder_decoder else {}
    how = {
        "logits_processors": tokenizer_files.generation_constraints(source),
        "stop_ids": tokenizer_files.eos_ids(source),
        "max_new_tokens": NEW,
        **start,
    }
    assert how["logits_processors"] is not None
    got = generate(ours, PROMPT, **how)
    assert got.sequence(0, with_stop=True).tolist() == wanted
    assert [int(step.ids[0]) for step in stream(ours, PROMPT, **how)] == wanted
    assert generate(ours, PROMPT, **how, use_cache=False).sequence(0, with_stop=True).tolist() == wanted
    # Rows of other lengths beside it change nothing, nor does a beam of one.
    together = generate(ours, [[4], PROMPT[0].tolist(), [9, 9, 9, 9, 9, 9, 2]], **how)
    assert together.sequence(1, with_stop=True).tolist() == wanted
    assert generate(ours, PROMPT, strategy=BeamSearch(1), **how).sequence(0, with_stop=True).tolist() == wanted


def test_sampling_and_beams_obey(both):
    _, ours, _ = both
    start = {"decoder_start_ids": 2} if hasattr(ours, "encoder") else {}
    limits = LogitsProcessors(suppress_tokens=tuple(range(2, 29)), no_repeat_ngram_size=2)
    for how in (Sample(seed=1, temperature=3.0), BeamSearch(3, n_best=2)):
        ids = (
            generate(ours, PROMPT, strategy=how, max_new_tokens=5, logits_processors=limits, **start)
            .sequence(0)
            .tolist()
        )
        assert set(ids) <= {0, 1, 29, 30}
        pairs = list(itertools.pairwise(ids))
        assert len(set(pairs)) == len(pairs)


def test_a_folder_without_such_a_file_is_read_from_its_configuration(made):
    _, folder = made("bart")
    (folder / "generation_config.json").unlink()
    source = checkpoint.open_checkpoint(folder)
    assert tokenizer_files.generation_constraints(source) == LogitsProcessors(
        forced_eos_token_ids=(BART["forced_eos_token_id"],)
    )
    assert tokenizer_files.decoder_start_ids(source) == (BART["decoder_start_token_id"],)


@pytest.mark.bad_input
def test_what_cannot_be_done_or_read_is_refused(llama):
    file = llama / "generation_config.json"
    for settings, said in (
        ({"guidance_scale": 2.0}, "guidance_scale 2.0"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"suppress_tokens": "all"}, "suppress_tokens"),
        ({"bad_words_ids": [["a"]]}, "bad_words_ids"),
    ):
        change_json(file, **settings)
        with pytest.raises(StorageError, match=said):
            tokenizer_files.generation_constraints(checkpoint.open_checkpoint(llama))
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
