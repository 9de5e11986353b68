"""Verdicts follow from the recorded cases, and a wrong correction raises."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from clearhead.course.claims import (
    DOES_NOT_HOLD,
    HOLDS,
    HOLDS_CONDITIONALLY,
    MISPRINT,
    ClaimError,
    Experiment,
    claims,
    convnet,
    dedup_decoder,
    logistic,
    masks,
    multihead,
    papers,
    permutation,
    perturbation,
    positions,
    scores_and_scaling,
    temperature,
)
from clearhead.course.claims.registry import Claim, judge


def make_claim(condition: str = "") -> Claim:
    return Claim(
        id="x",
        source="s",
        location="p",
        statement="says",
        method="m",
        condition=condition,
        theme="t",
        function=lambda t: None,
    )


def test_all_cases_passed_holds():
    t = Experiment()
    t.record_case("a", 1, True)
    assert judge(make_claim(), t).verdict == HOLDS


def test_failure_outside_condition_holds_conditionally():
    t = Experiment()
    t.record_case("a", 1, True)
    t.record_case("b", 2, False, in_scope=False)
    o = judge(make_claim("the condition"), t)
    assert (o.verdict, o.example_for, o.example_against) == (HOLDS_CONDITIONALLY, "a: 1", "b: 2")
    assert judge(make_claim(), t).verdict == DOES_NOT_HOLD  # without a condition every case is in scope


def test_failure_inside_condition_does_not_hold():
    t = Experiment()
    t.record_case("a", 1, True)
    t.record_case("b", 2, False)
    t.record_case("c", 3, False, in_scope=False)
    t.correction("the truth", True)
    o = judge(make_claim("the condition"), t)
    assert (o.verdict, o.counter_example, o.correction) == (DOES_NOT_HOLD, "b: 2", "the truth")


def test_condition_without_cases_does_not_hold():
    t = Experiment()
    t.record_case("b", 2, False, in_scope=False)
    assert judge(make_claim("the condition"), t).verdict == DOES_NOT_HOLD


def test_claim_without_cases_raises():
    with pytest.raises(ClaimError, match="'x' recorded no case"):
        judge(make_claim(), Experiment())


def test_failing_correction_raises():
    t = Experiment()
    t.record_case("a", 1, False)
    t.correction("also wrong", False)
    with pytest.raises(ClaimError, match="'x' does not hold either: also wrong"):
        judge(make_claim(), t)


def test_intended_statement_makes_misprint():
    t = Experiment()
    t.record_case("as printed", 1, False)
    t.intended("as meant", True)
    o = judge(make_claim(), t)
    assert (o.verdict, o.counter_example, o.correction) == (MISPRINT, "as printed: 1", "as meant")
    assert {"counter_example", "correction"} <= set(o.to_dict())
    t.cases.clear()
    t.record_case("as printed", 1, True)
    assert judge(make_claim(), t).verdict == HOLDS
    t.intended("meant otherwise", False)
    with pytest.raises(ClaimError, match="does not hold either: meant otherwise"):
        judge(make_claim(), t)


def pooled(x, *, causal=False):
    """Return the sum of all inputs at every position, which is permutation-invariant."""
    total = [sum(column, Fraction(0)) for column in zip(*x, strict=True)]
    return [total for _ in x]


REAL_NETWORK = convnet.network

MUTATIONS = [
    ("permutation-invariant-answered", permutation, "self_attention", pooled, HOLDS),
    ("swap-changes-nothing", permutation, "self_attention", pooled, HOLDS),
    ("key-noise-mean", perturbation, "gaussian_change", lambda score, sigma: sigma, DOES_NOT_HOLD),
    ("points-of-problem-1", papers, "POINTS", {"Part 3, Problem 1": (25, (5, 20))}, MISPRINT),
    ("score-variance", scores_and_scaling, "score_moments", lambda d, **_: (0, d + 1), DOES_NOT_HOLD),
    ("score-mean", scores_and_scaling, "score_moments", lambda d, **_: (1, d), DOES_NOT_HOLD),
    ("score-mean", scores_and_scaling, "moments_of_equal_vectors", lambda d: (0, d), HOLDS),
    ("score-variance", scores_and_scaling, "moments_of_equal_vectors", lambda d: (0, d), HOLDS),
    ("weights-by-content", permutation, "single_head_attention", lambda q, k: (q @ k.T).softmax(-1), DOES_NOT_HOLD),
    ("every-token-attends", masks, "causal", masks.full, HOLDS),
    ("grid-throughout", convnet, "network", lambda width: REAL_NETWORK(width)[:4], HOLDS),
    ("scale-in-training", scores_and_scaling, "jacobian_sizes", lambda *_, **__: ([0.1], [0.0]), HOLDS),
    ("specialization-redundancy", multihead, "jacobian_row", lambda y, x: 0 * x, DOES_NOT_HOLD),
    ("head-parameters", multihead, "parameters", lambda d, h: dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj"), d * d + d), DOES_NOT_HOLD),
    ("head-parameters", multihead, "parameters", lambda d, h: dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj"), d * d), HOLDS),
    ("temperature-zero", temperature, "to_limit", lambda z, at: [0, 0, 0, 1], DOES_NOT_HOLD),
    ("conv-program-runs", convnet, "PRINTED", convnet.PRINTED.replace(")\n    nn.ReLU", "),\n    nn.ReLU"), HOLDS),
    ("conv-linear-144", convnet, "network", lambda width: REAL_NETWORK(144), DOES_NOT_HOLD),
    ("dedup-values", dedup_decoder, "P", [[Fraction(1, 7)] * 7] * 7, DOES_NOT_HOLD),
    ("softmax-fixes", dedup_decoder, "gradients", lambda weights, first: dict.fromkeys(
        ("W_Q", "W_K", "W_V"), torch.zeros(4, 2)), DOES_NOT_HOLD),
    ("separable-no-minimum", logistic, "DATA", (((1, 1), 1), ((1, 1), -1)), DOES_NOT_HOLD),
    ("sinusoid-longer", positions, "previous_token_accuracy", lambda kind, seed: ((1.0,) * 3,) * 3, HOLDS),
    ("relative-longer", positions, "previous_token_accuracy", lambda kind, seed: ((1.0,) * 3,) * 3, DOES_NOT_HOLD),
]  # fmt: skip


@pytest.mark.parametrize(("name", "module", "attribute", "replacement", "verdict"), MUTATIONS)
def test_changed_result_changes_verdict(monkeypatch, name, module, attribute, replacement, verdict):
    monkeypatch.setattr(module, attribute, replacement)
    assert claims()[name].run(0).verdict == verdict


@pytest.mark.parametrize(
    ("name", "module", "attribute", "replacement"),
    [
        ("argmax-nothing-changes", dedup_decoder, "gradients",
         lambda weights, first: dict.fromkeys(("W_Q", "W_K", "W_V"), torch.zeros(4, 2))),
        ("dedup-two-heads", dedup_decoder, "W_O", dedup_decoder.exact.matrix([[1, 0, 1, 0], [0, 1, 0, 1]])),
        ("causal-lower-triangular", masks, "column_attention", lambda n, generator: torch.eye(n)),
    ],
)  # fmt: skip
def test_correction_that_fails_raises(monkeypatch, name, module, attribute, replacement):
    monkeypatch.setattr(module, attribute, replacement)
    with pytest.raises(ClaimError, match="does not hold either"):
        claims()[name].run(0)
