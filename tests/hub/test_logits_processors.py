"""Random combinations of logits processors give the ids of transformers, with greedy decoding and beam search."""

from __future__ import annotations

import random

import pytest
import torch

import clearhead as ch
from clearhead.generation import BeamSearch, Greedy, LogitsProcessors, generate

transformers = pytest.importorskip("transformers", reason="transformers, the reference to compare with, is missing")

VOCAB = 17
STOP = 1


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a GPT-2 of transformers with large random parameters, and the same model loaded here."""
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=41, n_embd=12, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=STOP,
        initializer_range=0.5,
    )  # fmt: skip
    reference = transformers.GPT2LMHeadModel(config).double().eval()
    folder = tmp_path_factory.mktemp("gpt2")
    reference.save_pretrained(folder)
    return reference, ch.load(folder, dtype=None)


def draw_settings(rng, n_new):
    """Draw logits processors as settings of transformers."""
    choices = {
        "repetition_penalty": rng.choice([0.5, 1.3, 2.0]),
        "no_repeat_ngram_size": rng.choice([1, 2, 3]),
        "bad_words_ids": [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(2)],
        "suppress_tokens": rng.sample(range(2, VOCAB), 2),
        "begin_suppress_tokens": rng.sample(range(2, VOCAB), 2),
        "forced_eos_token_id": [STOP],
        rng.choice(["min_length", "min_new_tokens"]): rng.randint(1, n_new),
    }
    return {name: value for name, value in choices.items() if rng.random() < 0.4}


def as_processors(settings):
    """Return the same settings as `LogitsProcessors`."""
    fields = {"forced_eos_token_id": "forced_eos_token_ids"}
    convert = {"bad_words_ids": lambda runs: tuple(map(tuple, runs))}
    values = {
        fields.get(name, name): convert.get(name, tuple)(value) if isinstance(value, list) else value
        for name, value in settings.items()
    }
    return LogitsProcessors(**values)


@pytest.mark.parametrize("seed", range(23))
def test_combined_logits_processors_match_transformers(models, seed):
    reference, model = models
    rng = random.Random(seed)
    length, n_new, width = rng.randint(2, 7), rng.randint(2, 9), rng.choice([1, 1, 3])
    prompts = [[rng.randrange(2, VOCAB) for _ in range(length)] for _ in range(3)]
    settings = draw_settings(rng, n_new)
    ids = torch.tensor(prompts)
    expected = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False, num_beams=width,
        early_stopping=True, eos_token_id=STOP, pad_token_id=STOP, **settings,
    )  # fmt: skip
    strategy = Greedy() if width == 1 else BeamSearch(width, early_stopping=True)
    actual = generate(
        model, prompts, strategy=strategy, max_new_tokens=n_new, stop_ids=STOP, slots=2,
        logits_processors=as_processors(settings),
    )  # fmt: skip
    for row, new_ids in enumerate(expected[:, length:].tolist()):
        n = int(actual.lengths[row, 0])
        assert new_ids[:n] == actual.sequence(row, with_stop=True).tolist(), settings
        assert set(new_ids[n:]) <= {STOP}
