"""Number of runs, threads and progress events of a check."""

from __future__ import annotations

import pytest
import torch

from clearhead.analysis.checks import NAMES, Verdict, check, runner
from clearhead.analysis.checks.buggy_modules import CORRECT
from clearhead.analysis.checks.harness import Harness


@pytest.fixture
def runs(monkeypatch):
    """Return the list of (tokens, threads) of every run of a module."""
    calls = []
    raw = Harness.raw

    def counted(harness, batch, *args):
        calls.append((batch.x.shape[0] * batch.x.shape[1], torch.get_num_threads()))
        return raw(harness, batch, *args)

    monkeypatch.setattr(Harness, "raw", counted)
    return calls


def test_check_shared_results_are_computed_once(runs):
    """Language model with 3 rows of T = 11 tokens: tokens of each run, grouped by purpose."""
    T, B = 11, 3
    full, half = B * T, T // 2
    right_pads, left_pads = [0, 1, 2, 5, 5], [1, 2, 5, 5]
    expected = {
        "can it be called, the output, determinism, rounding": [full] * (1 + 1 + 2 + 2),
        "another length": [B * (T - 1)],
        "the first row, each of its tokens changed, its gradients": [T] * (1 + T + 1),
        "the first tokens alone": [B * half, B * (T - 1)],
        "padding": [B * (T + n) for n in right_pads + left_pads],
        "polarity": [T] * 3,
        "the other rows alone, another order": [T, T, full],
        "caches": [full, *[B] * T, *[B * n for n in (3, 1, 4, 2, 1)]],
        "reordered and truncated caches": [B * n for n in (half, half, T - half, *[1] * (2 * (T - half)))],
        "one row in each dtype, in float64, and rounded twice": [T] * 3 * (1 + 1 + 2),
        "finiteness: the input, one token, an empty row, two extremes": [full, B, full, full, full],
        "gradients, training twice, watched": [full] * (1 + 2 + 1),
    }
    assert check(CORRECT["language model"]()).ok
    assert sorted(tokens for tokens, _ in runs) == sorted(n for each in expected.values() for n in each)


@pytest.mark.parametrize(("slow", "expected"), [(2, 1), (1, 2)])
def test_check_large_module_uses_fastest_thread_count(monkeypatch, runs, slow, expected):
    before = torch.get_num_threads()
    clock = iter(range(100))
    monkeypatch.setattr(runner, "LARGE", 1)
    monkeypatch.setattr(runner, "perf_counter", lambda: next(clock) * (9 if torch.get_num_threads() == slow else 1))
    torch.set_num_threads(2)
    try:
        check(CORRECT["reader"](), only="batch invariance")
        assert torch.get_num_threads() == 2, "the caller's setting is restored"
    finally:
        torch.set_num_threads(before)
    assert [threads for _, threads in runs][:3] == [2, 1, 2]  # one call, then one trial per thread count
    assert {threads for _, threads in runs[3:]} == {expected}


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("context use", "unused pairs"),
        ("gradient flow", "without gradient"),
        ("finiteness", "not finite"),
        ("score scale", "factor error"),
    ],
)
def test_check_names_what_a_property_counts(name, quantity):
    """A difference is wanted here, so "largest difference 0" would mislead."""
    finding = check(CORRECT["language model"](), only=name)[name]
    assert finding.verdict is Verdict.PASS
    assert str(finding).endswith(f"; 0 {quantity}")
    assert finding.to_dict()["quantity"] == quantity


def test_check_calls_on_start_before_each_property():
    events = []
    check(CORRECT["reader"](), on_start=lambda *event: events.append(event))
    assert events == [(name, n, len(NAMES)) for n, name in enumerate(NAMES)]
