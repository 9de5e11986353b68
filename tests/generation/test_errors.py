"""Invalid arguments of generation raise before the model runs."""

from __future__ import annotations

import re

import numpy
import pytest
import torch

from benchmarks.generation import cache_speed
from clearhead import errors
from clearhead.generation import BeamSearch, Greedy, LogitsProcessors, Sample, UncachedDecoder, generate, search, stream
from clearhead.models.baselines.recurrent import Classify, RecurrentConfig
from clearhead.nn.positions import LearnedPositions
from tests.generation.small import VOCAB, decoder, encoder_decoder
from tests.generation.tables import chaotic

pytestmark = pytest.mark.bad_input


def raises(error, text):
    return pytest.raises(error, match=re.escape(text))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Sample(temperature=0),
            "temperature is 0; expected a number above 0 (use Greedy() for the limit 0)",
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
        (lambda: BeamSearch(0), "BeamSearch: width is 0; expected a whole number of at least 1"),
        (lambda: BeamSearch(3, length_penalty=float("inf")), "length_penalty is inf; expected a number, and finite"),
        (lambda: BeamSearch(3, n_best=0), "BeamSearch: n_best is 0"),
        (
            lambda: BeamSearch(3, n_best=5),
            "n_best is 5 and width 3; expected n_best <= width: give width=5 or more",
        ),
        (lambda: cache_speed(repeats=0), "repeats is 0; expected at least 1"),
    ],
)
def test_strategies_reject_invalid_options(make, message):
    with raises(errors.ConfigError, message):
        make()


@pytest.mark.parametrize("function", [generate, stream])
@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, errors.ShapeError, "got no prompts; expected at least one row of ids"),
        ([[1, 2], []], {}, errors.ShapeError, "prompt 1 is empty; expected at least one id to continue"),
        (torch.zeros(3, 0, dtype=torch.int64), {}, errors.ShapeError, "prompt 0 is empty"),
        (torch.zeros(0, 3, dtype=torch.int64), {}, errors.ShapeError, "got no prompts"),
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
            "prompt 1 contains the id 23, but the model's vocabulary is 0 … 22",
        ),
        ([[1, -2]], {}, errors.ShapeError, "prompt 0 contains the id -2"),
        ([[1], [2, 2**70]], {}, errors.ShapeError, "prompt 1 contains 1180591620717411303424; expected token ids"),
        (None, {}, errors.DtypeError, "the prompt is a NoneType; expected ids"),
        (3, {}, errors.DtypeError, "the prompt is a int; expected ids"),
        (iter([[1]]), {}, errors.DtypeError, "the prompt is a list_iterator; expected ids"),
        (torch.tensor(3), {}, errors.ShapeError, "the prompt has shape (); expected ids"),
        ("hello", {}, errors.DtypeError, "the prompt is a str; expected ids"),
        (["hello"], {}, errors.DtypeError, "prompt 0 is 'hello'; expected a row of ids"),
        ([[1.5]], {}, errors.DtypeError, "prompt 0 is [1.5]; expected token ids, whole numbers"),
        (torch.zeros(1, 3), {}, errors.DtypeError, "prompt 0 is torch.float32; expected token ids"),
        (
            [[1]],
            {"max_new_tokens": 0},
            errors.ConfigError,
            "max_new_tokens is 0; expected a whole number of at least 1 and at most",
        ),
        ([[1]], {"max_new_tokens": 2.0}, errors.ConfigError, "max_new_tokens is 2.0"),
        ([[1]], {"stop_ids": -1}, errors.ConfigError, "stop_ids is -1; expected an id, several ids, or None"),
        ([[1]], {"stop_ids": 2.5}, errors.ConfigError, "stop_ids is 2.5; expected an id, several ids, or None"),
        ([[1]], {"stop_ids": torch.tensor(3)}, errors.ConfigError, "expected an id, several ids, or None"),
        (
            [[1]],
            {"logits_processors": "min_length"},
            errors.ConfigError,
            "logits_processors is 'min_length'; expected LogitsProcessors(…)",
        ),
        ([[1]], {"strategy": Greedy}, errors.ConfigError, "this is the class: add parentheses"),
        (
            [[1]],
            {"strategy": "greedy"},
            errors.ConfigError,
            "strategy is 'greedy'; expected Greedy(…) or Sample(…)",
        ),
        (
            [[1]],
            {"decoder_start_ids": 3},
            errors.ConfigError,
            "decoder_start_ids is 3, but a Decoder continues its prompt",
        ),
    ],
)
def test_invalid_arguments_raise_before_model_runs(function, prompt, options, error, message):
    model = decoder()
    model.embedding.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with raises(error, message):
        function(model, prompt, **options)


def test_prompts_beyond_position_table_raise_before_model_runs():
    model = decoder(positions=LearnedPositions(max_len=61))
    rows = [[1, 2], [3] * 40]
    fits = generate(model, rows, max_new_tokens=22)  # 40 + 22 − 1 = 61: the last new id is not read again
    assert fits.ids.shape[-1] == 22
    model.embedding.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with raises(
        errors.ShapeError, "prompt 1 has 40 ids and max_new_tokens is 23, which needs 62 positions, but the model's"
    ):
        generate(model, rows, max_new_tokens=23)
    with raises(errors.ShapeError, "give max_new_tokens=22 or less"):
        generate(model, rows, max_new_tokens=23)
    with raises(errors.ShapeError, "prompt 0 has 62 ids, but the model's table of learned positions has 61 rows"):
        generate(model, [[1] * 62], max_new_tokens=1)


def test_encoder_decoder_rejects_invalid_start_ids_and_lengths():
    model = encoder_decoder(positions=LearnedPositions(max_len=13), max_len=13)
    with raises(errors.ConfigError, "an encoder-decoder needs decoder_start_ids"):
        generate(model, [[1]])
    for start in (VOCAB, -1, [], [1, True], 2.5, torch.tensor(3)):
        with raises(errors.ConfigError, "expected one id, or several, from the target's vocabulary, 0 … 22"):
            generate(model, [[1]], decoder_start_ids=start)
    with raises(errors.ShapeError, "prompt 0 contains the id 19, but the model's vocabulary is 0 … 18"):
        generate(model, [[19]], decoder_start_ids=1)
    with raises(errors.ShapeError, "prompt 0 has 14 ids, but the model's table of learned positions has 13 rows"):
        generate(model, [[1] * 14], decoder_start_ids=1, max_new_tokens=3)
    with raises(errors.ShapeError, "decoder_start_ids has 1 ids and max_new_tokens is 14, which needs 14 positions"):
        generate(model, [[1] * 3], decoder_start_ids=1, max_new_tokens=14)
    assert generate(model, [[1] * 13], decoder_start_ids=1, max_new_tokens=13).ids.shape == (1, 1, 13)


def test_models_without_next_token_logits_are_rejected():
    with raises(errors.DtypeError, "got a Linear; expected a Decoder, EncoderDecoder"):
        generate(torch.nn.Linear(2, 3), [[1]])
    with raises(errors.ConfigError, "this Recurrent classifies"):
        generate(RecurrentConfig(vocab_size=5, d_model=3, task=Classify(n_classes=2)).build(), [[1]])
    with raises(errors.ConfigError, "this Decoder attends to a memory"):
        generate(encoder_decoder().decoder, [[1]])


@pytest.mark.parametrize("penalty", [1000.0, -1000.0, 10**9])
def test_length_penalty_beyond_float_range_raises(penalty):
    with raises(errors.ConfigError, "expected a power of the length within the range of a float: usually 0 to 2"):
        generate(decoder(), [[1]], strategy=BeamSearch(3, length_penalty=penalty), max_new_tokens=7)


def test_stream_rejects_beam_search():
    with raises(errors.ConfigError, "cannot be streamed because any id may change until its end; use generate"):
        stream(decoder(), [[1]], strategy=BeamSearch(3))


@pytest.mark.parametrize("strategy", [Greedy(), BeamSearch(2)], ids=str)
def test_search_validates_custom_decoders(strategy):
    prompt = torch.tensor([[1]])
    with raises(
        errors.DtypeError,
        "got a function; expected an IncrementalDecoder with prefill(), decode_step(ids) and reorder_cache(rows)",
    ):
        search(chaotic(5), strategy=strategy)
    with raises(errors.ConfigError, "stop id 9 is outside the vocabulary of 5 ids (0 … 4)"):
        search(UncachedDecoder(chaotic(5), prompt), strategy=strategy, stop_ids=[2, 9])
    with raises(errors.ShapeError, "the decoder's logits have shape (1, 1, 5); expected (rows, vocabulary)"):
        search(UncachedDecoder(lambda ids: chaotic(5)(ids)[None], prompt), strategy=strategy)
    with raises(errors.DtypeError, "the decoder's logits are torch.int64; expected floating point"):
        search(UncachedDecoder(lambda ids: ids, prompt), strategy=strategy)


@pytest.mark.parametrize("options", [{}, {"sliding_context": True}], ids=["plain", "slide"])
@pytest.mark.parametrize("function", [generate, stream])
def test_max_new_beyond_any_memory_raises_config_error(function, options):
    model = decoder()
    with raises(
        errors.ConfigError,
        "max_new_tokens is 9999999999999; expected a whole number of at least 1 and at most 16,777,216",
    ):
        function(model, [1, 2], max_new_tokens=9999999999999, **options)


class _Echo:
    """The smallest generator of text."""

    def generate_texts(self, texts, *, strategy, max_new_tokens):
        return [text + "!" for text in texts]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("stop_ids", 3),
        ("decoder_start_ids", [1]),
        ("use_cache", False),
        ("sliding_context", True),
        ("logits_processors", LogitsProcessors(bad_words_ids=[[3]])),
        ("engine", "module"),
        ("slots", 2),
    ],
)
def test_generate_from_a_text_rejects_options_of_ids(option, value):
    assert generate(_Echo(), ["Hi"]) == ["Hi!"]
    with raises(errors.ConfigError, f"a pipeline does not take {option}; call generate(pipeline.model, ids, {option}="):
        generate(_Echo(), "Hi", **{option: value})


def test_ids_of_numpy_are_ids():
    model = encoder_decoder()
    expected = generate(model, [[1]], decoder_start_ids=3, stop_ids=[2, 5], max_new_tokens=7)
    ids = generate(model, [[1]], decoder_start_ids=numpy.int64(3), stop_ids=numpy.array([5, 2]), max_new_tokens=7)
    assert torch.equal(ids.ids, expected.ids)
