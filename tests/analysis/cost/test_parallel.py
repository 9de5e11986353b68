"""Predicted cost per GPU against processes that really train a model with DDP and FSDP."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from clearhead.analysis.cost import Machine, cost
from clearhead.analysis.cost.fit import cost_per_gpu, parse_bandwidth
from clearhead.errors import ConfigError

MACHINE = Machine("a", "cuda", {"float32": 1e9}, 1e12, 0.0)
SIZES = (2, 4)


@pytest.fixture(scope="module")
def step():
    return cost("tiny-decoder", tokens=13, batch=2, training=True, device="cpu")


@pytest.fixture(scope="module")
def process_results(tmp_path_factory):
    """Return the folder of results of processes that trained with DDP and with FSDP."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "tests.analysis.cost.processes", str(folder), *map(str, SIZES)]
    subprocess.run(command, check=True, timeout=600)
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", SIZES)
def test_cost_per_gpu_equals_real_processes(kind, size, process_results, step):
    folder = process_results / str(size)
    results = [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(size)]
    predicted = cost_per_gpu(step, size, kind)
    first = results[0]  # rows are rounded up: the first process has the most
    assert (predicted.parameters, predicted.gradients, predicted.optimizer) == (
        first["parameters"],
        first["gradients"],
        first["optimizer"],
    )
    if kind == "ddp":  # ring all-reduce: each process sends 2(n − 1)/n of the reduced bytes
        assert {result["reduced"] for result in results} == {step.memory.parameters.value}
        assert predicted.sent == 2 * first["reduced"] * (size - 1) // size
    else:  # each shard is sent to all other processes
        assert {result["shards"] for result in results} == {first["shards"]}
        assert predicted.sent == first["shards"] * (size - 1)
        assert max(result["parameters"] for result in results) == predicted.parameters


def test_cost_per_gpu_time_adds_exposed_communication(step):
    time = step.time(MACHINE)
    fast, slow = (cost_per_gpu(step, 4, "ddp", machine=MACHINE, interconnect=link) for link in (1e15, 1e3))
    assert fast.seconds == pytest.approx(time.seconds)
    assert slow.seconds == pytest.approx(time.seconds + slow.sent / 1e3 - time.backward)
    spread = cost_per_gpu(step, 4, "fsdp", machine=MACHINE, interconnect=1e3)
    assert spread.seconds == pytest.approx(spread.compute_seconds + spread.sent / 1e3 - time.forward - time.backward)


def test_cost_per_gpu_peak_decreases_with_gpus(step):
    peaks = [cost_per_gpu(step, n, "fsdp").peak for n in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert cost_per_gpu(step, 2, "ddp").peak == step.memory.peak.value + step.memory.parameters.value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda step: cost_per_gpu(step, 1, "ddp"), "at least 2 GPUs"),
        (lambda step: cost_per_gpu(step, 2, "tensor"), "parallel is 'tensor'; expected ddp or fsdp"),
        (lambda step: parse_bandwidth("fast"), "cannot parse bandwidth 'fast'"),
        (lambda step: parse_bandwidth("5 apples/s"), "cannot parse memory size"),
    ],
)
def test_cost_per_gpu_invalid_arguments_raise_config_error(step, call, message):
    with pytest.raises(ConfigError, match=message):
        call(step)


def test_parse_bandwidth_valid_text_returns_bytes_per_second():
    assert parse_bandwidth("450GB/s") == 450e9
    assert parse_bandwidth("2 GiB / s") == 2**31
