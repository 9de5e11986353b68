"""Captured functions: eager warm-up, one capture, replays in the same memory; here with a stand-in on the CPU."""

from __future__ import annotations

import pytest
import torch

from clearhead.ops.cuda_graph import GraphedCallable, graphs_for, sdpa_without_cudnn
from tests.support.cpu_graphs import CPUGraphs


@pytest.mark.parametrize("warmup_calls", [0, 1, 3])
def test_graphed_callable_captures_once_after_the_warmup(warmup_calls):
    graphs = CPUGraphs()
    source, result = torch.zeros(5), torch.zeros(5)
    python_calls = []

    def run():
        python_calls.append(1)
        result.copy_(source.square() + 1)

    call = GraphedCallable(run, graphs, warmup_calls=warmup_calls)
    for number in range(7):
        source.fill_(number)
        call()
        assert torch.equal(result, torch.full((5,), number**2 + 1.0))
        assert call.is_captured == (number >= warmup_calls)
    assert len(python_calls) == warmup_calls + 1  # a replay does not run the Python function
    assert graphs.log == ["capture"] + ["replay"] * (7 - warmup_calls)


def test_graphed_callable_without_graphs_runs_eagerly():
    assert graphs_for(torch.device("cpu")) is None
    calls = []
    call = GraphedCallable(lambda: calls.append(1), None)
    for _ in range(3):
        call()
    assert len(calls) == 3
    assert not call.is_captured


def test_graphed_callable_failed_capture_raises_and_is_repeated():
    attempts = []

    class FailingGraphs(CPUGraphs):
        def capture(self, run):
            attempts.append(1)
            if len(attempts) == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(run)

    counter = torch.zeros(())
    call = GraphedCallable(lambda: counter.add_(1), FailingGraphs(), warmup_calls=0)
    with pytest.raises(RuntimeError, match="not permitted"):
        call()
    assert not call.is_captured
    call()
    assert call.is_captured


def test_sdpa_without_cudnn_excludes_cudnn_inside_the_block_only():
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with sdpa_without_cudnn():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    with sdpa_without_cudnn(enabled=False):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
