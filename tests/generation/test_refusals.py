"""What cannot be done is said at once, before the model runs: what was got, what was expected, what to do."""

from __future__ import annotations

import re

import pytest
import torch

from clearhead import errors
from clearhead.bench.generation import cache_speed
from clearhead.generation import Beam, Greedy, Recompute, Sample, generate, search, stream
from clearhead.models.recurrent import Classify, RecurrentConfig
from clearhead.positions import Learned
from tests.generation.small import VOCAB, decoder, encoder_decoder
from tests.generation.tables import chaotic

pytestmark = pytest.mark.bad_input


def says(error, text):
    return pytest.raises(error, match=re.escape(text))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Sample(temperature=0),
            "temperature is 0; expected a number above 0 (for the limit 0, the",
        ),
        (lambda: Sample(temperature=float("nan")), "temperature is nan"),
        (lambda: Sample(temperature=float("inf")), "temperature is inf"),
        (lambda: Sample(temperature=-1.0), "temperature is -1.0"),
        (lambda: Sample(top_k=0), "Sample: top_k is 0; expected a whole number of at least 1"),
        (lambda: Sample(top_k=2.0), "top_k is 2.0"),
        (lambda: Sample(top_k=True), "top_k is True"),
        (lambda: Sample(top_p=0.0), "Sample: top_p is 0.0; expected a number above 0 and at most 1"),
        (lambda: Sample(top_p=1.1), "top_p is 1.1"),
        (lambda: Sample(min_p=-0.1), "Sample: min_p is -0.1; expected a number of at least 0 and at most 1"),
        (lambda: Sample(seed=-1), "Sample: seed is -1; expected a whole number of at least 0"),
        (lambda: Beam(0), "Beam: width is 0; expected a whole number of at least 1"),
        (lambda: Beam(3, length_penalty=float("inf")), "length_penalty is inf; expected a number, and finite"),
        (lambda: Beam(3, n_best=0), "Beam: n_best is 0"),
        (
            lambda: Beam(3, n_best=5),
            "n_best is 5 and width 3; a search returns at most as many sequences as it keeps",
        ),
        (lambda: cache_speed(repeats=0), "repeats is 0; expected at least 1"),
    ],
)
def test_choices_refuse_nonsense(make, message):
    with says(errors.ConfigError, message):
        make()


@pytest.mark.parametrize("way", [generate, stream])
@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, errors.ShapeError, "there are no prompts; expected at least one row of ids"),
        ([[1, 2], []], {}, errors.ShapeError, "prompt 1 is empty; expected at least one id to go on from"),
        (torch.zeros(3, 0, dtype=torch.int64), {}, errors.ShapeError, "prompt 0 is empty"),
        (torch.zeros(0, 3, dtype=torch.int64), {}, errors.ShapeError, "there are no prompts"),
        (
            torch.zeros(2, 3, 5, dtype=torch.int64),
            {},
            errors.ShapeError,
            "the prompt has shape (2, 3, 5); expected ids",
        ),
        (
            [torch.zeros(2, 3, dtype=torch.int64)],
            {},
            errors.ShapeError,
            "prompt 0 has shape (2, 3); expected one row",
        ),
        (
            [[1, 2], [VOCAB, 3]],
            {},
            errors.ShapeError,
            "prompt 1 holds the id 23, but the model's vocabulary is 0 … 22",
        ),
        ([[1, -2]], {}, errors.ShapeError, "prompt 0 holds the id -2"),
        ("hello", {}, errors.DtypeError, "the prompt is a str; expected ids"),
        (["hello"], {}, errors.DtypeError, "prompt 0 is 'hello'; expected a row of ids"),
        ([[1.5]], {}, errors.DtypeError, "prompt 0 is [1.5]; expected whole numbers, token ids"),
        (torch.zeros(1, 3), {}, errors.DtypeError, "prompt 0 is torch.float32; expected token ids"),
        ([[1]], {"max_new": 0}, errors.ConfigError, "max_new is 0; expected a whole number of at least 1 and at most"),
        ([[1]], {"max_new": 2.0}, errors.ConfigError, "max_new is 2.0"),
        ([[1]], {"stop": -1}, errors.ConfigError, "stop is -1; expected an id, several ids, or None"),
        ([[1]], {"how": Greedy}, errors.ConfigError, "that is the class: add the brackets"),
        (
            [[1]],
            {"how": "greedy"},
            errors.ConfigError,
            "how is 'greedy'; expected Greedy(…) or Sample(…)",
        ),
        ([[1]], {"start": 3}, errors.ConfigError, "start is 3, but a Decoder goes on from its prompt"),
    ],
)
def test_calls_are_refused_before_the_model_runs(way, prompt, options, error, message):
    model = decoder()
    model.embedding.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with says(error, message):
        way(model, prompt, **options)


def test_what_runs_off_a_table_of_positions_is_refused_at_once():
    model = decoder(positions=Learned(max_len=61))
    rows = [[1, 2], [3] * 40]
    fits = generate(model, rows, max_new=22)  # 40 + 22 − 1 = 61: the last new id is not read again
    assert fits.ids.shape[-1] == 22
    model.embedding.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with says(errors.ShapeError, "prompt 1 has 40 ids and max_new is 23, which needs 62 positions, but the model's"):
        generate(model, rows, max_new=23)
    with says(errors.ShapeError, "give max_new=22 or less"):
        generate(model, rows, max_new=23)
    with says(errors.ShapeError, "prompt 0 has 62 ids, but the model's table of learned positions has 61 rows"):
        generate(model, [[1] * 62], max_new=1)


def test_an_encoder_decoder_is_refused_what_it_cannot_do():
    model = encoder_decoder(positions=Learned(max_len=13), max_len=13)
    with says(errors.ConfigError, "an encoder-decoder writes after a start: give start="):
        generate(model, [[1]])
    for start in (VOCAB, -1, [], [1, True]):
        with says(errors.ConfigError, "expected one id, or several, from the target's vocabulary, 0 … 22"):
            generate(model, [[1]], start=start)
    with says(errors.ShapeError, "prompt 0 holds the id 19, but the model's vocabulary is 0 … 18"):
        generate(model, [[19]], start=1)
    with says(errors.ShapeError, "prompt 0 has 14 ids, but the model's table of learned positions has 13 rows"):
        generate(model, [[1] * 14], start=1, max_new=3)
    with says(errors.ShapeError, "start has 1 ids and max_new is 14, which needs 14 positions"):
        generate(model, [[1] * 3], start=1, max_new=14)
    assert generate(model, [[1] * 13], start=1, max_new=13).ids.shape == (1, 1, 13)


def test_models_that_do_not_predict_ids():
    with says(errors.DtypeError, "got a Linear; expected a Decoder, EncoderDecoder"):
        generate(torch.nn.Linear(2, 3), [[1]])
    with says(errors.ConfigError, "this Recurrent classifies"):
        generate(RecurrentConfig(vocab_size=5, d_model=3, task=Classify(n_classes=2)).build(), [[1]])
    with says(errors.ConfigError, "this Decoder reads a memory"):
        generate(encoder_decoder().decoder, [[1]])


@pytest.mark.parametrize("penalty", [1000.0, -1000.0, 10**9])
def test_a_length_penalty_beyond_floats_is_refused(penalty):
    with says(errors.ConfigError, "expected a power of the length that a float can hold: usual are 0 to 2"):
        generate(decoder(), [[1]], how=Beam(3, length_penalty=penalty), max_new=7)


def test_beam_search_is_not_streamed():
    with says(errors.ConfigError, "cannot be streamed: until its end, any id may still change; use generate"):
        stream(decoder(), [[1]], how=Beam(3))


@pytest.mark.parametrize("how", [Greedy(), Beam(2)], ids=str)
def test_foreign_steppers_are_looked_at(how):
    prompt = torch.tensor([[1]])
    with says(errors.DtypeError, "got a function; expected a Stepper, with begin(), step(ids) and reorder(rows)"):
        search(chaotic(5), how=how)
    with says(errors.ConfigError, "stop id 9 can never be generated: the vocabulary has 5 ids (0 … 4)"):
        search(Recompute(chaotic(5), prompt), how=how, stop=[2, 9])
    with says(errors.ShapeError, "the stepper's logits have shape (1, 1, 5); expected (rows, vocabulary)"):
        search(Recompute(lambda ids: chaotic(5)(ids)[None], prompt), how=how)
    with says(errors.DtypeError, "the stepper's logits are torch.int64; expected floating point"):
        search(Recompute(lambda ids: ids, prompt), how=how)


@pytest.mark.parametrize("options", [{}, {"slide": True}], ids=["plain", "slide"])
@pytest.mark.parametrize("function", [generate, stream])
def test_max_new_beyond_any_memory_raises_config_error(function, options):
    model = decoder()
    with says(
        errors.ConfigError, "max_new is 9999999999999; expected a whole number of at least 1 and at most 16,777,216"
    ):
        function(model, [1, 2], max_new=9999999999999, **options)
