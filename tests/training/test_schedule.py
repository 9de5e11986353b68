"""Learning-rate schedules, compared with the formulas of the exam and of the paper."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ConfigError
from clearhead.training import Constant, InverseSqrt, WarmupCosine


@pytest.fixture
def exam_schedule():
    """Return the schedule of the exam (CENG 403, Transformers and Attention, Q7a)."""
    return WarmupCosine(0.001, 4000, 100_000)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.0),
        (1, 0.001 / 4000),
        (1000, 0.00025),
        (4000, 0.001),
        (4000 + 96_000 // 6, 0.001 * (2 + math.sqrt(3)) / 4),  # a sixth of the way: cos 30° = √3/2
        (4000 + 96_000 // 3, 0.00075),  # a third: cos 60° = 1/2
        (52_000, 0.0005),  # half: cos 90° = 0
        (4000 + 2 * 96_000 // 3, 0.00025),  # two thirds: cos 120° = −1/2
    ],
)
def test_warmup_cosine_at_special_angles_equals_exact_values(exam_schedule, step, rate):
    assert exam_schedule(step) == pytest.approx(rate, rel=1e-14, abs=1e-20)


def test_warmup_cosine_at_boundaries_is_exact(exam_schedule):
    assert exam_schedule(0) == 0.0
    assert exam_schedule(4000) == 0.001
    assert exam_schedule(100_000) == 0.0
    assert exam_schedule(4001) < 0.001
    assert 0.001 - exam_schedule(4001) < 1e-12  # the cosine starts flat


def test_warmup_cosine_after_total_steps_is_zero(exam_schedule):
    assert [exam_schedule(step) for step in (100_001, 150_000, 196_000)] == [0.0, 0.0, 0.0]


def test_warmup_cosine_rises_then_falls(exam_schedule):
    rates = [exam_schedule(step) for step in range(0, 100_001, 250)]
    peak = rates.index(0.001)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


@given(st.integers(1, 5000), st.integers(1, 5000), st.data())
def test_warmup_cosine_warm_up_is_linear(warmup, decay_steps, data):
    step = data.draw(st.integers(0, warmup))
    exact = Fraction(0.003) * Fraction(step, warmup)
    assert WarmupCosine(0.003, warmup, warmup + decay_steps)(step) == pytest.approx(float(exact), rel=1e-15)


def test_warmup_cosine_without_warm_up_or_without_decay():
    assert WarmupCosine(0.5, 0, 10)(0) == 0.5
    assert WarmupCosine(0.5, 0, 10)(5) == pytest.approx(0.25)
    assert WarmupCosine(0.5, 10, 10)(10) == 0.5
    assert WarmupCosine(0.5, 10, 10)(99) == 0.5


@given(st.integers(1, 2048), st.integers(1, 8000), st.integers(1, 20_000))
def test_inverse_sqrt_equals_the_papers_formula(width, warmup, step):
    paper = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
    assert InverseSqrt.of_width(width, warmup)(step) == pytest.approx(paper, rel=1e-12)


def test_constant_warms_up_linearly():
    assert [Constant(0.5, 2)(step) for step in range(4)] == [0.0, 0.25, 0.5, 0.5]
    assert Constant(0.5)(0) == 0.5


def test_warmup_cosine_is_frozen_and_comparable(exam_schedule):
    assert exam_schedule == WarmupCosine(lr_max=0.001, warmup_steps=4000, total_steps=100_000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        exam_schedule.lr_max = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: WarmupCosine(0.1, 11, 10),
            "warmup_steps is 11 and total_steps is 10; expected warmup_steps ≤ total_steps",
        ),
        (lambda: WarmupCosine(0.1, -1, 10), "warmup_steps is -1; expected a whole number of at least 0"),
        (lambda: WarmupCosine(0.1, 0, 0), "total_steps is 0; expected a whole number of at least 1"),
        (lambda: WarmupCosine(0.0, 0, 10), r"lr_max is 0\.0; expected a number above 0"),
        (lambda: WarmupCosine(math.nan, 0, 10), "lr_max is nan; expected a number above 0"),
        (lambda: WarmupCosine(math.inf, 0, 10), "lr_max is inf; expected a number above 0, and finite"),
        (lambda: WarmupCosine()(1), r"total_steps is None; expected the length of the run; use \.over"),
        (lambda: InverseSqrt(0.1, 0), "expected a whole number of at least 1"),
        (lambda: Constant(0.1, -1), "warmup_steps is -1; expected a whole number of at least 0"),
        (lambda: Constant(0.1)(-1), "step is -1; expected a whole number of at least 0"),
    ],
)
def test_schedule_invalid_arguments_raise_config_error(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
