"""What a check costs: how many runs, on how many threads, and what is said while it goes on."""

from __future__ import annotations

import pytest
import torch

from clearhead.checks import NAMES, check, runner
from clearhead.checks.gallery import CORRECT
from clearhead.checks.lab import Lab


@pytest.fixture
def runs(monkeypatch):
    """The tokens and the threads of every run of a module."""
    seen = []
    raw = Lab.raw

    def counted(lab, batch, *args):
        seen.append((batch.x.shape[0] * batch.x.shape[1], torch.get_num_threads()))
        return raw(lab, batch, *args)

    monkeypatch.setattr(Lab, "raw", counted)
    return seen


def test_what_properties_share_is_run_once(runs):
    """A language model of 11 tokens in 3 rows: these are its runs, by what they are for."""
    shared = 1 + 1 + 1 + 2 + 2  # can it be called, plain, a length less, rounding twice, determinism
    influences = 1 + 11 + 1  # the first row, each token changed, gradients
    padding, polarity, rows = 2 * 4 + 1, 3, 2 + 1
    caches = 1 + 11 + 5 + (1 + 6) + (2 + 6)
    dtypes, finiteness, learning, watched = 3 * (1 + 1 + 2), 5, 1 + 2, 1
    assert check(CORRECT["language model"]()).ok
    assert len(runs) == sum(
        (shared, influences, padding, polarity, rows, caches, dtypes, finiteness, learning, watched)
    )
    assert sum(tokens for tokens, _ in runs) < 1400


@pytest.mark.parametrize(("slow", "chosen"), [(2, 1), (1, 2)])
def test_a_large_module_runs_on_as_many_threads_as_are_quickest(monkeypatch, runs, slow, chosen):
    before = torch.get_num_threads()
    clock = iter(range(100))
    monkeypatch.setattr(runner, "LARGE", 1)
    monkeypatch.setattr(runner, "perf_counter", lambda: next(clock) * (9 if torch.get_num_threads() == slow else 1))
    torch.set_num_threads(2)
    try:
        check(CORRECT["reader"](), only="batch invariance")
        assert torch.get_num_threads() == 2, "the caller's setting is put back"
    finally:
        torch.set_num_threads(before)
    assert [threads for _, threads in runs][:3] == [2, 1, 2]  # called at all, and one of each tried
    assert {threads for _, threads in runs[3:]} == {chosen}


def test_each_property_is_announced_before_it_is_tested():
    told = []
    check(CORRECT["reader"](), on_start=lambda *one: told.append(one))
    assert told == [(name, n, len(NAMES)) for n, name in enumerate(NAMES)]
