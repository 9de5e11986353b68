"""Tests of the properties that all position choices share: frozen, serializable and documented."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from clearhead.nn import positions
from clearhead.nn.positions import (
    ALiBi,
    Disentangled,
    LearnedPositions,
    NoPE,
    Positions,
    RelativeBias,
    Rotary,
    Sinusoidal,
)

CHOICES = {
    Sinusoidal(base=97.0): "added",
    LearnedPositions(max_len=11): "added",
    LearnedPositions(grid=(3, 5), n_extra=1): "added",
    Rotary(base=500000.0, partial_rotary_factor=0.5): "rotary",
    RelativeBias(n_buckets=16, max_distance=67, bidirectional=False): "bias",
    ALiBi(): "bias",
    NoPE(): "none",
    Disentangled(n_buckets=4, max_distance=11): "content",
}


@pytest.mark.parametrize(("choice", "kind"), CHOICES.items(), ids=str)
def test_position_choice_has_expected_kind(choice, kind):
    assert choice.kind == kind
    assert "kind" not in dataclasses.asdict(choice)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_position_choice_is_frozen_and_round_trips(choice):
    twin = type(choice)(**dataclasses.asdict(choice))
    assert twin == choice
    assert hash(twin) == hash(choice)
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.base = 3.0


@pytest.mark.parametrize("choice", typing.get_args(Positions))
def test_position_docstrings_describe_extrapolation(choice):
    assert "Beyond the trained length:" in choice.__doc__


def test_integer_base_is_converted_to_float(unchecked):
    assert Sinusoidal(base=10000) == Sinusoidal()
    assert isinstance(Rotary(base=10000).base, float)


def test_positions_exports_all_choices():
    assert set(typing.get_args(Positions)) == {type(choice) for choice in CHOICES}
    for name in positions.__all__:
        assert hasattr(positions, name)
