"""Several GPUs on paper, against processes that really share a model out: what each holds and what each sends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from clearhead.costs import Machine, cost
from clearhead.costs.fit import link_of, share
from clearhead.errors import ConfigError

MACHINE = Machine("a", "cuda", {"float32": 1e9}, 1e12, 0.0)
SIZES = (2, 4)


@pytest.fixture(scope="module")
def step():
    return cost("tiny-decoder", tokens=13, batch=2, training=True, device="cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of what processes wrote down that trained both ways, one after the other."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "tests.costs.processes", str(folder), *map(str, SIZES)]
    subprocess.run(command, check=True, timeout=600)
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", SIZES)
def test_what_processes_hold_and_send(kind, size, trained, step):
    folder = trained / str(size)
    found = [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(size)]
    predicted = share(step, size, kind)
    first = found[0]  # rows are rounded up: the first process has the most
    assert (predicted.weights, predicted.gradients, predicted.optimiser) == (
        first["weights"], first["gradients"], first["optimiser"],
    )  # fmt: skip
    if kind == "ddp":  # each process sends 2(n − 1)/n of what is reduced in a ring
        assert {one["reduced"] for one in found} == {step.memory.weights.value}
        assert predicted.sent == 2 * first["reduced"] * (size - 1) // size
    else:  # each shard goes to all others
        assert {one["shards"] for one in found} == {first["shards"]}
        assert predicted.sent == first["shards"] * (size - 1)
        assert max(one["weights"] for one in found) == predicted.weights


def test_a_step_waits_for_what_does_not_hide(step):
    took = step.time(MACHINE)
    fast, slow = (share(step, 4, "ddp", machine=MACHINE, link=link) for link in (1e15, 1e3))
    assert fast.seconds == pytest.approx(took.seconds)
    assert slow.seconds == pytest.approx(took.seconds + slow.sent / 1e3 - took.backward)
    spread = share(step, 4, "fsdp", machine=MACHINE, link=1e3)
    assert spread.seconds == pytest.approx(spread.computing + spread.sent / 1e3 - took.forward - took.backward)


def test_more_gpus_hold_less(step):
    peaks = [share(step, n, "fsdp").peak for n in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert share(step, 2, "ddp").peak == step.memory.peak.value + step.memory.weights.value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda step: share(step, 1, "ddp"), "at least 2 GPUs"),
        (lambda step: share(step, 2, "tensor"), "parallel is 'tensor'; expected ddp or fsdp"),
        (lambda step: link_of("fast"), "'fast' is no rate"),
        (lambda step: link_of("5 apples/s"), "no size of memory"),
    ],
)
def test_refusals(step, call, message):
    with pytest.raises(ConfigError, match=message):
        call(step)


def test_rates():
    assert link_of("450GB/s") == 450e9
    assert link_of("2 GiB / s") == 2**31
