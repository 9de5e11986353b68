"""What all position choices share: they are values, they say where they belong, and nothing is none."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from clearhead.nn import positions
from clearhead.nn.positions import ALiBi, LearnedPositions, NoPE, Positions, RelativeBias, Rotary, Sinusoidal

CHOICES = {
    Sinusoidal(base=97.0): "added",
    LearnedPositions(max_len=11): "added",
    LearnedPositions(grid=(3, 5), n_extra=1): "added",
    Rotary(base=500000.0, partial_rotary_factor=0.5): "rotary",
    RelativeBias(n_buckets=16, max_distance=67, bidirectional=False): "bias",
    ALiBi(): "bias",
    NoPE(): "none",
}


@pytest.mark.parametrize(("choice", "kind"), CHOICES.items(), ids=str)
def test_a_choice_says_where_it_goes(choice, kind):
    assert choice.kind == kind
    assert "kind" not in dataclasses.asdict(choice)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_choice_is_a_frozen_value_that_round_trips(choice):
    twin = type(choice)(**dataclasses.asdict(choice))
    assert twin == choice
    assert hash(twin) == hash(choice)
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.base = 3.0


@pytest.mark.parametrize("choice", typing.get_args(Positions))
def test_every_choice_states_what_happens_beyond_the_trained_length(choice):
    assert "Beyond the trained length:" in choice.__doc__


def test_whole_numbers_are_accepted_for_bases_as_files_give_them(unchecked):
    assert Sinusoidal(base=10000) == Sinusoidal()
    assert isinstance(Rotary(base=10000).base, float)


def test_exports():
    assert set(typing.get_args(Positions)) == {type(choice) for choice in CHOICES}
    for name in positions.__all__:
        assert hasattr(positions, name)
