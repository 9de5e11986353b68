"""Tests of the validation of plain values: accepted values, rejected values, and the same message everywhere."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead._core.validation import (
    DropoutRate,
    NonNegativeInt,
    OpenUnit,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    check_int,
    did_you_mean,
    validate,
)
from clearhead.config import Validated
from clearhead.errors import ConfigError, MaskError
from clearhead.models import DecoderConfig
from clearhead.nn import GELU, BlockConfig, FeedForward, LayerNorm, MultiHeadAttention, RMSNorm
from clearhead.nn.positions import Rotary

pytestmark = pytest.mark.bad_input  # passes values of other types to functions that expect a number

VALID: list[tuple[Any, Any, Any]] = [
    (3, int, 3),
    (np.int64(3), int, 3),
    (3, float, 3.0),
    (math.inf, float, math.inf),
    (0, NonNegativeInt, 0),
    (1, PositiveInt, 1),
    (10**30, PositiveInt, 10**30),
    (0, DropoutRate, 0.0),
    (0.999, DropoutRate, 0.999),
    (1, Probability, 1.0),
    (True, bool, True),
    (None, PositiveInt | None, None),
    ([2, 3], tuple[PositiveInt, PositiveInt], (2, 3)),
    ([], tuple[int, ...], ()),
    ([["a", "b"]], tuple[tuple[str, str], ...], (("a", "b"),)),
    ("slow", Literal["fast", "slow"], "slow"),
    (RMSNorm(), LayerNorm | RMSNorm, RMSNorm()),
    (object, Any, object),
]


@pytest.mark.parametrize(("value", "hint", "result"), VALID, ids=str)
def test_validate_of_valid_value_returns_type_of_annotation(value, hint, result):
    actual = validate(value, "it", hint)
    assert actual == result
    assert type(actual) is type(result)


INVALID: list[tuple[Any, Any, str]] = [
    ("12", PositiveInt, "it is '12'; expected a whole number of at least 1"),
    (True, int, "it is True; expected a whole number"),
    (3.0, int, "it is 3.0; expected a whole number"),
    (torch.tensor(3), int, "it is tensor(3); expected a whole number"),
    (0, PositiveInt, "it is 0; expected a whole number of at least 1"),
    (-1, NonNegativeInt, "it is -1; expected a whole number of at least 0"),
    (1.0, DropoutRate, "it is 1.0; expected a number of at least 0 and below 1"),
    (math.nan, DropoutRate, "it is nan; expected a number of at least 0 and below 1"),
    (math.inf, PositiveFloat, "it is inf; expected a number above 0, and finite"),
    ("1", Probability, "it is '1'; expected a number of at least 0 and at most 1"),
    (True, float, "it is True; expected a number"),
    (10**400, float, f"it is 1{'0' * 59}…; expected a number"),
    (
        10**5000,
        Annotated[int, Range(le=9)],
        "it is something too long to print; expected a whole number of at most 9",
    ),
    (1, bool, "it is 1; expected True or False"),
    (3, str, "it is 3; expected text"),
    (None, int, "it is None; expected a whole number"),
    (0, PositiveInt | None, "it is 0; expected a whole number of at least 1 or None"),
    ((2, 0), tuple[PositiveInt, PositiveInt], "it is (2, 0); expected 2 values, each a whole number of at least 1"),
    ((2, 0.5, 1), tuple[int, float], "it is (2, 0.5, 1); expected (a whole number, a number)"),
    ((2, "a"), tuple[int, ...], "it is (2, 'a'); expected values, each a whole number"),
    ("medium", Literal["fast", "slow"], "it is 'medium'; expected 'fast' or 'slow'"),
    ("layer", LayerNorm | RMSNorm, "it is 'layer'; expected LayerNorm(…) or RMSNorm(…)"),
    (
        GELU,
        LayerNorm | GELU,
        "it is <class 'clearhead.ops.activations.GELU'>; expected LayerNorm(…) or GELU(…); this is the class: "
        "add parentheses",
    ),
]


@pytest.mark.parametrize(("value", "hint", "sentence"), INVALID, ids=range(len(INVALID)))
def test_validate_of_invalid_value_raises_one_sentence(value, hint, sentence):
    with pytest.raises(ConfigError) as caught:
        validate(value, "it", hint)
    assert str(caught.value) == sentence


@given(
    st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.booleans()),
    st.sampled_from([DropoutRate, OpenUnit, Probability]),
)
def test_validate_accepts_exactly_the_numbers_inside_a_range(value, hint):
    contains = {
        DropoutRate: lambda x: 0 <= x < 1,
        OpenUnit: lambda x: 0 < x < 1,
        Probability: lambda x: 0 <= x <= 1,
    }[hint]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and contains(value):
        assert validate(value, "it", hint) == value
    else:
        with pytest.raises(ConfigError, match="it is "):
            validate(value, "it", hint)


def test_check_int_raises_given_error_outside_limits():
    assert check_int(np.int32(7), "n", minimum=7, maximum=7) == 7
    with pytest.raises(MaskError, match=r"^n is 6; expected a whole number of at least 7$"):
        check_int(6, "n", minimum=7, error=MaskError)
    with pytest.raises(MaskError, match=r"^n is 8; expected a whole number of at most 7$"):
        check_int(8, "n", maximum=7, error=MaskError)


def test_check_int_runs_in_compiled_graph():
    @torch.compile(fullgraph=True, backend="eager")
    def f(x, n):
        return x * check_int(n, "n", minimum=1)

    assert torch.equal(f(torch.ones(2), 3), torch.full((2,), 3.0))


def test_validated_value_is_created_in_compiled_graph():
    @torch.compile(fullgraph=True, backend="eager")
    def rotated(x, positions):
        return Rotary(base=500.0).rotate(x, positions)

    x, positions = torch.randn(2, 5, 6), torch.arange(5)
    torch.testing.assert_close(rotated(x, positions), Rotary(base=500.0).rotate(x, positions))


# ---------------------------------------------------------------------- one message for every owner

SIZES = {"d_model": 12, "n_heads": 3}
MAKERS = {
    "MultiHeadAttention": lambda **sizes: MultiHeadAttention(sizes.pop("d_model"), sizes.pop("n_heads"), **sizes),
    "BlockConfig": BlockConfig,
    "DecoderConfig": lambda **sizes: DecoderConfig(vocab_size=5, n_layers=1, **sizes),
}
MISTAKES = [
    ({"d_model": "12"}, "d_model is '12'; expected a whole number of at least 1"),
    ({"d_model": 0}, "d_model is 0; expected a whole number of at least 1"),
    ({"n_heads": 3.0}, "n_heads is 3.0; expected a whole number of at least 1"),
    ({"n_heads": "3"}, "n_heads is '3'; expected a whole number of at least 1"),
    ({"n_heads": True}, "n_heads is True; expected a whole number of at least 1"),
    ({"d_head": 0}, "d_head is 0; expected a whole number of at least 1 or None"),
    ({"n_kv_heads": "1"}, "n_kv_heads is '1'; expected a whole number of at least 1 or None"),
    ({"bias": 1}, "bias is 1; expected True or False or Biases(…)"),
    ({"dropout": 1.5}, "dropout is 1.5; expected a number of at least 0 and below 1"),
    (
        {"n_heads": 5},
        "d_model is 12 and n_heads is 5; expected a multiple of n_heads: change one of them, or give d_head",
    ),
    (
        {"n_kv_heads": 2},
        "n_heads is 3 and n_kv_heads is 2; expected a multiple of n_kv_heads, so that each key head serves the "
        "same number of query heads",
    ),
]


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES, ids=str)
@pytest.mark.parametrize("owner", MAKERS)
def test_invalid_size_raises_the_same_sentence_for_every_owner(owner, mistake, sentence):
    with pytest.raises(ConfigError) as caught:
        MAKERS[owner](**SIZES | mistake)
    assert str(caught.value) == f"{owner}: {sentence}"


def test_invalid_size_of_layer_raises():
    with pytest.raises(ConfigError, match="MultiHeadAttention: d_key is 'wide'; expected a whole number of at least 1"):
        MultiHeadAttention(12, 3, d_key="wide")
    with pytest.raises(ConfigError, match="FeedForward: d_ff is None; expected a whole number of at least 1"):
        FeedForward(12, None, GELU())


# ---------------------------------------------------------------------- custom values


@dataclass(frozen=True)
class SplitConfig(Validated):
    fraction: Probability = 0.5
    sizes: tuple[PositiveInt, ...] = ()

    def validate(self) -> None:
        if self.fraction == 0.25:
            raise ConfigError("no quarters")


def test_validated_dataclass_converts_and_checks_fields():
    split = SplitConfig(1, [2, 3])
    assert split == SplitConfig(1.0, (2, 3))
    assert (type(split.fraction), hash(split)) == (float, hash(SplitConfig(1.0, (2, 3))))
    with pytest.raises(ConfigError, match="SplitConfig: fraction is 2; expected a number of at least 0 and at most 1"):
        SplitConfig(2)
    with pytest.raises(ConfigError, match="no quarters"):
        SplitConfig(0.25)


# ---------------------------------------------------------------------- did you mean


def test_did_you_mean_suggests_nearest_name_or_lists_known():
    assert did_you_mean("d_modl", ["n_heads", "d_model"]) == "did you mean 'd_model'?"
    assert did_you_mean("zzz", ["n_heads", "d_model"]) == "known: n_heads, d_model"
    assert did_you_mean("zzz", ["n_heads"], fallback="see --help") == "see --help"
    assert did_you_mean("zzz", []) == "known: none"


@given(st.one_of(st.text(), st.none(), st.integers()), st.lists(st.text()))
def test_did_you_mean_never_suggests_an_empty_name(name, candidates):
    answer = did_you_mean(name, candidates)
    assert "mean ''" not in answer
    if answer.startswith("did you mean"):
        nonempty = list(filter(None, candidates))
        assert answer == f"did you mean {difflib.get_close_matches(str(name)[:80], nonempty, 1)[0]!r}?"


def test_only_validation_searches_for_similar_names():
    package = Path(__file__).parents[2] / "clearhead"
    modules = [path.name for path in package.rglob("*.py") if "get_close_matches" in path.read_text(encoding="utf-8")]
    assert modules == ["validation.py"]
