"""The sandbox ends cases that use more CPU time or memory than their budget."""

from __future__ import annotations

import os

import pytest
import torch

from tools.fuzz_cases.sandbox import Budget, OverBudgetError, run_limited

SMALL = Budget(cpu_seconds=1, memory=64 << 20)


def test_run_limited_returns_the_result_from_another_process():
    parent = os.getpid()
    assert run_limited(lambda: [os.getpid() != parent, "text"], SMALL) == [True, "text"]


def test_run_limited_with_an_endless_loop_raises():
    def loop():
        while True:
            pass

    with pytest.raises(OverBudgetError, match="more than 1 s of CPU time"):
        run_limited(loop, SMALL)


def test_run_limited_with_more_memory_than_the_budget_raises():
    with pytest.raises(OverBudgetError, match="more than 64 MiB of memory"):
        run_limited(lambda: torch.ones(100 << 18).sum().item(), SMALL)


def test_run_limited_counts_memory_that_the_parent_has_freed():
    threshold = torch.ones(31 << 18)
    del threshold  # glibc allocates smaller tensors in one heap from now on
    freed = [torch.ones(25 << 18) for _ in range(9)]
    last = torch.ones(20 << 18)  # keeps the heap from shrinking
    del freed
    with pytest.raises(OverBudgetError, match="more than 64 MiB of memory"):
        run_limited(lambda: torch.ones(100 << 18).sum().item(), SMALL)
    assert last.numel() == 20 << 18


def test_run_limited_with_absurd_memory_raises():
    with pytest.raises(OverBudgetError, match=r"RuntimeError|MemoryError"):
        run_limited(lambda: torch.ones(1 << 40), SMALL)


def test_run_limited_with_a_killed_process_raises():
    with pytest.raises(OverBudgetError, match="SIGABRT"):
        run_limited(os.abort, SMALL)
