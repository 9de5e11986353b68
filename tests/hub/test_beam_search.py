"""Beam search under the settings of generation_config.json, compared with transformers for three families."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from clearhead.generation import BeamSearch, LogitsProcessors, generate
from clearhead.hub import checkpoint
from tests.support.reference_models import V
from tests.support.third_party_models import PEERS

N_PROMPTS = 24
NEW = 16
STOPS = tuple(range(7, V, 6))  # so many stop ids that most sequences end before the last step
MAX_DIFFERENT = (
    2  # of the 312 sequences of a family, so that at least 98.4% (850 of 864) are equal, also in two processes
)
# Settings of `generate` in transformers, all with 4 beams.
SETTINGS = {
    "default": {},
    "early stopping": {"early_stopping": True},
    "never stopping early": {"early_stopping": "never"},
    "no length penalty": {"length_penalty": 0.0},
    "length penalty 2, never stopping early": {"length_penalty": 2.0, "early_stopping": "never"},
    "negative length penalty": {"length_penalty": -0.5},
    "two beams": {"num_beams": 2, "early_stopping": True},
    "repetition penalty": {"repetition_penalty": 1.5},
    "reward of repetition": {"repetition_penalty": 0.8, "early_stopping": True},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[3], [4, 5]]},
    "lengths": {"min_new_tokens": 6, "forced_eos_token_id": STOPS[0]},
    "normalized again": {"repetition_penalty": 1.3, "suppress_tokens": [11, 12], "renormalize_logits": True},
}
STRATEGY_KEYS = ("num_beams", "early_stopping", "length_penalty")


def processors_of(settings):
    options = {key: value for key, value in settings.items() if key not in STRATEGY_KEYS}
    if "bad_words_ids" in options:
        options["bad_words_ids"] = tuple(map(tuple, options["bad_words_ids"]))
    if "suppress_tokens" in options:
        options["suppress_tokens"] = tuple(options["suppress_tokens"])
    if "forced_eos_token_id" in options:
        options["forced_eos_token_ids"] = (options.pop("forced_eos_token_id"),)
    return LogitsProcessors(**options) if options else None


@pytest.fixture(scope="module", params=["llama", "gpt2", "bart"])
def pair(request, tmp_path_factory):
    """The reference model, clearhead's, and the list of the different sequences."""
    peer = PEERS[request.param]
    length = "n_positions" if request.param == "gpt2" else "max_position_embeddings"
    torch.manual_seed(11)
    reference = type(peer)(peer.model, peer.config, {**peer.sizes, length: 40}).build()
    folder = tmp_path_factory.mktemp("beams") / "model"
    peer.save(reference, folder)
    return reference, checkpoint.load_third_party(folder), []


def reference_ids(reference, prompt, settings):
    """Return the new ids of transformers, and the score."""
    from transformers import GenerationConfig

    reference.generation_config = GenerationConfig(
        eos_token_id=list(STOPS),
        pad_token_id=0,
        decoder_start_token_id=2,
        **{"num_beams": 4, **copy.deepcopy(settings)},
    )
    result = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = result.sequences[0, 1 if reference.config.is_encoder_decoder else prompt.shape[1] :].tolist()
    ids = list(itertools.takewhile(lambda id_: id_ not in STOPS, ids))
    return ids, float(result.sequences_scores[0])


@pytest.mark.parametrize("name", SETTINGS)
def test_beam_search_matches_transformers(pair, name):
    """Two hypotheses with the same score up to rounding may change places, so a few sequences may differ."""
    reference, model, different = pair
    settings = {"num_beams": 4} | SETTINGS[name]
    strategy = BeamSearch(
        settings["num_beams"],
        length_penalty=settings.get("length_penalty", 1.0),
        early_stopping=settings.get("early_stopping", False),
    )
    options = {"decoder_start_ids": 2} if reference.config.is_encoder_decoder else {}
    generator = torch.Generator().manual_seed(5)
    n_equal = n_ended = 0
    for _ in range(N_PROMPTS):
        prompt = torch.randint(2, V, (1, int(torch.randint(2, 9, (1,), generator=generator))), generator=generator)
        ids, score = reference_ids(reference, prompt, settings)
        generated = generate(
            model,
            prompt,
            strategy=strategy,
            max_new_tokens=NEW,
            stop_ids=STOPS,
            logits_processors=processors_of(settings),
            **options,
        )
        is_equal = generated.sequence(0).tolist() == ids
        n_equal += is_equal
        n_ended += len(ids) < NEW
        if not is_equal:
            different.append((name, prompt, ids, score))
        else:
            assert float(generated.scores[0, 0]) == pytest.approx(score, abs=1e-4)
    print(f"\n{name}: {n_equal} of {N_PROMPTS} sequences are equal; {n_ended} end before the last step")
    assert len(different) <= MAX_DIFFERENT, different
