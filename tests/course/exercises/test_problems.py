"""Bundled problems: float64 agrees, and comparisons with documents have the expected results."""

from __future__ import annotations

import pytest

from clearhead.course.exercises import bundled_problems, solve

# (step, does the document agree?) in the order of the files.
VERDICTS = {
    "attention-1000-512": [],
    "cnn-digits": [("shapes", True), ("weights", True)],
    "convolution-128": [("shapes", True)],
    "eight-heads": [
        ("d_head", True), ("per_head", True), ("parameters_total", True), ("stored", True), ("stored_total", True),
    ],
    "layer-norm-identity": [("length", True)],
    "layer-norm-negative-scale": [],
    "receptive-field": [("formula", True)],
    "schedule": [],
    "sinusoid-position-3": [],
    "sort-dedup": [
        ("scores", False), ("weights", False), ("weights", True), ("z", True), ("r", False), ("loss", False),
        ("targets_loss_own", True), ("loss_own", True), ("grad_Q", True), ("grad_K", True), ("grad_V", False),
    ],
    "sort-dedup-softmax": [],
    "sort-dedup-two-heads": [("r", False), ("loss", False), ("loss_own", False)],
    "sparse-16": [],
    # Derivations and the like, which no document works in numbers.
    **{name: [] for name in (
        "attention-by-hand", "complexity-table", "convolution-by-attention", "encoder-decoder",
        "encoder-decoder-softmax", "infinity-norm-step", "layer-norm-batch-norm", "masks-by-architecture",
        "multi-head-shapes", "permutation-by-attention", "permutation-equivariance", "perturb-key-query",
        "residual-gradient", "rnn-two-steps", "scale-key", "score-variance", "softmax-jacobian",
        "softmax-temperature", "theta-lines", "vit-tokens",
    )},
}  # fmt: skip


def test_verdicts_cover_every_bundled_problem():
    assert list(bundled_problems()) == sorted(VERDICTS)
    assert all(bundled_problems().values())


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_bundled_problem_agrees_with_float64(name):
    work = solve(name)
    assert work.checks
    assert all(check.difference <= 1e-12 for check in work.checks)
    assert [(comparison.step, comparison.agrees) for comparison in work.comparisons] == VERDICTS[name]
    assert work.source
    assert len({step.key for step in work.steps}) == len(work.steps)
    for comparison in work.comparisons:
        assert comparison.agrees or len(comparison.sentences) >= 2, "a difference is explained"


def test_comparison_describes_differences():
    sentences = {(c.step, c.agrees): " ".join(c.sentences) for c in solve("sort-dedup").comparisons}
    assert "a 7×8 matrix; computed is 7×7" in sentences["scores", False]
    assert "the cells they share agree" in sentences["scores", False]
    assert "a 6×4 matrix; computed is 7×4" in sentences["r", False]
    assert "gives 4.2114; computed is 8.7973" in sentences["loss", False]
    assert "0 for every cell; 4 of its 8 cells differ" in sentences["grad_V", False]
    two = {c.step: " ".join(c.sentences) for c in solve("sort-dedup-two-heads").comparisons}
    assert "28 of its 28 cells differ" in two["r"]
    assert "computed is 10.2114" in two["loss_own"]
