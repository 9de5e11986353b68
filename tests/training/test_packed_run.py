"""Runs on packed rows: resumed, compiled and captured in a CUDA graph they equal the eager uninterrupted run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from clearhead.data import Batch, TokenBatch
from clearhead.training import read_log, train
from clearhead.training.step_runner import WARMUP_CALLS, GraphedStep
from tests.support.cpu_graphs import CPUGraphs
from tests.training.tiny import assert_same_run
from tests.training.workers import PACKED, write_pairs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU to capture graphs")
SETTINGS = PACKED | {
    "dropout": 0.1,
    "steps": 11,
    "eval_every": 11,
    "checkpoint_every": 4,
    "keep": 3,
    "r_drop_alpha": 2.0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "train.tsv")


def run(data, folder, **settings):
    return train("translation", data=data, out=folder, overrides=SETTINGS | settings)


def losses(folder):
    return [row["loss"] for row in read_log(folder) if row["kind"] == "train"]


@pytest.mark.parametrize("at", [4, 8])
def test_packed_run_resumed_equals_uninterrupted(data, tmp_path, at):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run(data, unbroken)
    shutil.copytree(unbroken, broken)
    for checkpoint in broken.glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > at:
            shutil.rmtree(checkpoint)
    shutil.rmtree(broken / "model")
    train(resume=broken)
    assert_same_run(unbroken, broken)


@pytest.mark.compiled
@pytest.mark.slow
def test_packed_run_compiled_equals_eager_and_compiles_each_block_class_once(data, tmp_path):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    run(data, tmp_path / "compiled", compile=True, dropout=0.0)
    n_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run(data, tmp_path / "plain", dropout=0.0)
    assert n_graphs == 3  # an encoder block, a decoder block and the loss
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


@needs_gpu
@pytest.mark.compiled
def test_packed_run_captured_equals_eager(data, tmp_path):
    run(data, tmp_path / "recorded", compile=True, device="cuda", dropout=0.0, steps=23)
    run(data, tmp_path / "plain", device="cuda", dropout=0.0, steps=23)
    assert losses(tmp_path / "recorded") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
    run(data, tmp_path / "dropping", compile=True, device="cuda", dropout=0.3, steps=23)
    again = losses(tmp_path / "dropping")
    assert len(set(again)) == len(again) == 23


@dataclass(frozen=True, kw_only=True)
class _Numbers(TokenBatch):
    """A batch of which only the ids are used."""


def _numbers(rows: torch.Tensor) -> Batch:
    weights = torch.ones(rows.shape, device=rows.device)
    lengths = torch.full((len(rows),), rows.shape[1], device=rows.device)
    return _Numbers(ids=rows, lengths=lengths, labels=rows, weights=weights, n_tokens=1, n_padded=1, n_labels=1)


@needs_gpu
def test_graphed_step_replay_reads_the_batch_redraws_dropout_and_keeps_gradients():
    table = nn.Parameter(torch.arange(11.0, device="cuda"))
    plain_calls = []

    def once(batch: Batch, scale: float | torch.Tensor) -> torch.Tensor:
        plain_calls.append(batch)
        assert isinstance(batch, TokenBatch)
        total = table[batch.ids].sum() + 0.0 * torch.rand((), device="cuda")
        (total * scale).backward()
        return total.detach() + torch.rand((), device="cuda") / 1024

    recorded = GraphedStep(once, [table])
    drawn = set()
    for number in range(9):
        ids = torch.tensor([[number, number + 1, number + 1]], device="cuda")
        loss = recorded(_numbers(ids), 0.5 + number).item()
        expected = torch.zeros(11, device="cuda")
        expected[number], expected[number + 1] = 1.0, 2.0
        assert int(loss) == 3 * number + 2
        drawn.add(loss - int(loss))
        assert table.grad is not None
        assert torch.equal(table.grad, expected * (0.5 + number))
        table.grad = None
    assert len(plain_calls) == 4  # three warm-up calls and the captured call
    assert len(drawn) == 9
    # A batch of another shape runs without the captured graph.
    loss = recorded(_numbers(torch.tensor([[3]], device="cuda")), 1.0).item()
    assert int(loss) == 3
    assert len(plain_calls) == 5


def test_graphed_step_on_the_stand_in_equals_eager_gradients_and_losses():
    """Warm-up on the side stream, one capture, replays; gradients of several batches per update add up."""
    table, unused = nn.Parameter(torch.arange(11.0)), nn.Parameter(torch.ones(3))
    python_calls = []

    def step(batch: Batch, scale: float | torch.Tensor) -> torch.Tensor:
        python_calls.append(batch)
        assert isinstance(batch, TokenBatch)
        total = table[batch.ids].square().sum()
        (total * scale).backward()
        return total.detach()

    graphs = CPUGraphs()
    graphed = GraphedStep(step, [table, unused], graphs=graphs)
    reference = nn.Parameter(table.detach().clone())
    for number in range(9):
        for micro_batch in range(1 + number % 2):  # updates of one and of two batches
            ids = torch.tensor([[number, number + 1, (number + 3 * micro_batch) % 11]])
            loss = graphed(_numbers(ids), 0.5 + number).clone()
            expected = reference[ids].square().sum()
            (expected * (0.5 + number)).backward()
            assert loss.item() == expected.item()
        assert torch.equal(table.grad, reference.grad)
        assert unused.grad is None
        table.grad = reference.grad = None
    assert len(python_calls) == WARMUP_CALLS + 1
    assert graphs.log[: WARMUP_CALLS + 1] == ["side stream"] * WARMUP_CALLS + ["capture"]
    assert graphs.log.count("replay") == 13 - WARMUP_CALLS
    # A batch of another shape runs eagerly, on the side stream.
    graphed(_numbers(torch.tensor([[3]])), 1.0)
    assert len(python_calls) == WARMUP_CALLS + 2
    assert graphs.log[-1] == "side stream"


def test_graphed_step_repeats_a_capture_that_failed():
    attempts = []

    class FailingGraphs(CPUGraphs):
        def capture(self, run):
            attempts.append(1)
            if len(attempts) == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(run)

    table = nn.Parameter(torch.arange(11.0))

    def step(batch: Batch, scale: float | torch.Tensor) -> torch.Tensor:
        total = table[batch.ids].sum()
        (total * scale).backward()
        return total.detach()

    graphs = FailingGraphs()
    graphed = GraphedStep(step, [table], graphs=graphs)
    batch = _numbers(torch.tensor([[1, 2, 2]]))
    for _ in range(3):
        graphed(batch, 1.0)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphed(batch, 1.0)
    table.grad = None
    assert graphed(batch, 0.5).item() == 5
    assert table.grad is not None
    assert torch.equal(table.grad, torch.tensor([0, 0.5, 1.0, 0, 0, 0, 0, 0, 0, 0, 0]))
    assert len(attempts) == 2
