"""Predicted time: the ceiling of each kernel, and measured rates that agree with their use."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clearhead.analysis.cost import AttentionSizes, Machine, cost, preset
from clearhead.analysis.cost import measure as machines
from clearhead.analysis.cost.measure import MeasuredCost
from clearhead.masks import window
from tests.analysis.cost.subjects import SUBJECTS, token_counts

CPU = torch.device("cpu")
PLAIN = Machine("a", "cuda", {"float32": 1e6}, 1e18, 0.0)


def test_time_is_flops_bytes_and_launches():
    prediction = cost(AttentionSizes(64, 4), tokens=128)
    slow_arithmetic = Machine("a", "cpu", {"float32": 1e6}, 1e18, 0.0)
    slow_memory = Machine("b", "cpu", {"float32": 1e18}, 1e6, 0.0)
    assert prediction.time(slow_arithmetic).seconds == pytest.approx(prediction.forward.value / 1e6)
    assert prediction.time(slow_arithmetic).bottleneck == "arithmetic"
    assert prediction.time(slow_memory).seconds == pytest.approx(prediction.bytes_accessed.value / 1e6)
    assert prediction.time(slow_memory).bottleneck == "memory traffic"
    both = Machine("c", "cpu", {"float32": 1e6}, 1e6, 0.0)
    assert prediction.time(both).seconds == pytest.approx(
        (prediction.forward.value + prediction.bytes_accessed.value) / 1e6
    )
    slow_launch = Machine("d", "cpu", {"float32": 1e18}, 1e18, 1.0)
    assert prediction.time(slow_launch).seconds == pytest.approx(5)  # four projections and one fused kernel
    assert prediction.time(slow_launch).bottleneck == "kernel launches"


def test_time_unaligned_gemms_use_their_rate():
    """GPT-2's vocabulary of 50,257 is not a multiple of 8; the widths of its projections are."""
    even, odd = (
        cost(preset("tiny-decoder").replace(vocab_size=vocabulary), tokens=13, training=True)
        for vocabulary in (104, 103)
    )
    slow = replace(PLAIN, unaligned_gemm_flops={"float32": 1e5})
    assert even.time(slow).seconds == even.time(PLAIN).seconds
    logits = 2 * 13 * 32 * 103  # forward; twice that backward
    added = 3 * logits * (1 / 1e5 - 1 / 1e6)
    assert odd.time(slow).seconds == pytest.approx(odd.time(PLAIN).seconds + added)
    slower = replace(slow, unaligned_gemm_backward_flops={"float32": 1e4})
    added += 2 * logits * (1 / 1e4 - 1 / 1e5)
    assert odd.time(slower).seconds == pytest.approx(odd.time(PLAIN).seconds + added)


def test_unaligned_gemms_lists_parts():
    assert cost("gpt2", tokens=13).unaligned_gemms == ("Decoder",)  # 50,257, of its logits
    assert cost("base", tokens=13).unaligned_gemms == ()  # 37,000


def test_time_reductions_use_their_bandwidth():
    prediction = cost(AttentionSizes(64, 4), tokens=128, training=True)
    plain = Machine("a", "cuda", {"float32": 1e18}, 1e9, 0.0)
    slow = replace(plain, reduction_bandwidth={"float32": 1e8})
    added = 4 * 128 * 64 * 4 * (1 / 1e8 - 1 / 1e9)  # the gradients of four biases read (128, 64) values each
    assert prediction.time(slow).seconds == pytest.approx(prediction.time(plain).seconds + added)


def test_time_fast_device_waits_for_host():
    prediction = cost(AttentionSizes(64, 4), tokens=128)
    machine = Machine("a", "cuda", {"float32": 1e18}, 1e18, 0.0, host_launch_s={"forward": 0.25, "training": 1.0})
    assert prediction.kernel_launches == 5
    assert prediction.time(machine).seconds == pytest.approx(1.25)
    assert prediction.time(machine).bottleneck == "host wait"
    assert prediction.time(replace(machine, host_pass_s={"forward": 3.0})).seconds == pytest.approx(4.25)
    slow = replace(machine, gemm_flops={"float32": 1e6})
    # The device waits for the launch of the first kernel only.
    assert prediction.time(slow).seconds == pytest.approx(prediction.forward.value / 1e6 + 0.25)
    assert prediction.time(slow).host_wait == pytest.approx(0.25)
    assert prediction.time(slow).bottleneck == "arithmetic"


@pytest.mark.parametrize("issue", [0.0, 1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "rnn"])
def test_time_equals_simulated_host_and_device(name, issue):
    """Simulate the clocks of host and device, launch by launch."""
    prediction = cost(SUBJECTS[name], tokens=token_counts(SUBJECTS[name], 13, 11), batch=3, training=True)
    machine = Machine(
        "a", "cuda", {"float32": 1e9}, 1e9, 1e-5, host_launch_s={"training": issue}, host_pass_s={"training": 0.003}
    )
    host, device, busy = 0.003, 0.0, 0.0
    for _, _, kernel in prediction.kernels():
        host += issue
        device = max(device, host) + sum(machine.seconds(kernel, torch.float32))
        busy += sum(machine.seconds(kernel, torch.float32))
    time = prediction.time(machine)
    assert time.seconds == pytest.approx(device)
    assert time.host_wait == pytest.approx(device - busy)


def seconds_of_attention(prediction, forward, backward):
    """Return the seconds that these rates of fused attention add to those of 1e6 FLOP/s for all products."""
    slow = replace(PLAIN, attention_flops={"float32": forward}, attention_backward_flops={"float32": backward})
    return prediction.time(slow).seconds - prediction.time(PLAIN).seconds


@pytest.mark.parametrize("impl", ["sdpa", "sparse"])
def test_time_fused_attention_uses_its_rates(impl):
    """Two products forward; five backward, or seven if a plan computes scores and their gradients twice."""
    prediction = cost(AttentionSizes(64, 4), tokens=128, batch=3, training=True, mask=window(16, 0), impl=impl)
    assert prediction.pairs is not None
    product = 2 * 64 * prediction.pairs.computed.value
    back = 7 if impl == "sparse" else 5
    assert seconds_of_attention(prediction, 1e5, 1e6) == pytest.approx(2 * product * (1 / 1e5 - 1 / 1e6))
    assert seconds_of_attention(prediction, 1e6, 1e4) == pytest.approx(back * product * (1 / 1e4 - 1 / 1e6))


def test_time_reference_attention_uses_gemm_rate():
    prediction = cost(AttentionSizes(64, 4), tokens=128, training=True, impl="reference")
    assert seconds_of_attention(prediction, 1e3, 1e3) == 0


def test_machine_from_legacy_file_uses_gemm_rate():
    legacy = {"name": "a", "device": "cuda", "matrix_rate": {"float32": 1e6}, "bandwidth": 1e18, "launch": 0.0}
    legacy |= {"issue": {"training": 0.25}, "begin": {"training": 3.0}, "workspace": 7}
    new = replace(
        PLAIN,
        host_launch_s={"training": 0.25},
        host_pass_s={"training": 3.0},
        workspace_bytes=7,
        unaligned_gemm_flops={"float32": 1e6},
        attention_flops={"float32": 1e6},
        attention_backward_flops={"float32": 1e6},
    )
    prediction = cost("tiny-decoder", tokens=13, training=True)
    assert prediction.time(Machine.from_dict(legacy)) == prediction.time(new)
    assert Machine.from_dict(new.to_dict()) == new


# ---------------------------------------------------------------------- measuring


@pytest.fixture
def constant_flop_rate(monkeypatch):
    """Replace the clock: every call runs at 1e6 FLOP/s, as counted by torch."""

    def time_of(call, **_):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops() / 1e6

    monkeypatch.setattr(machines, "time_of", time_of)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of a CPU is not counted; the math implementation is
        yield


@pytest.mark.usefixtures("constant_flop_rate")
def test_gemm_rates_are_flops_per_second():
    assert machines._matrix_rate(CPU, torch.float32, 13) == pytest.approx(1e6)
    assert machines._odd_rates(CPU, torch.float32, 7, 11, 13) == pytest.approx((1e6, 1e6))


@pytest.mark.usefixtures("constant_flop_rate")
def test_attention_rates_count_predicted_flops():
    """The math implementation saves the weights; fused attention recomputes them: five products instead of four."""
    batch, heads, tokens, width = 2, 3, 7, 5
    rates = machines._attention_rates(CPU, torch.float32, batch, heads, tokens, width)
    charged = cost(AttentionSizes(heads * width, heads), tokens=tokens, batch=batch, training=True)
    product = 2 * batch * heads * tokens**2 * width
    by_clock = {"forward": 2 * product / 1e6, "backward": 4 * product / 1e6}
    attend = next(part for part in charged.parts if part.name == "MultiHeadAttention")
    assert rates[0] * by_clock["forward"] == pytest.approx(attend.forward.value)
    assert rates[1] * by_clock["backward"] == pytest.approx(attend.backward.value)


def test_host_times_come_from_two_depths_and_ignore_outliers(monkeypatch):
    """The host takes 7 s per pass and 0.25 s per kernel (forward), 11 s and 0.5 s (training); every fifth is slow."""
    host = {False: (7.0, 0.25), True: (11.0, 0.5)}
    timings = count()

    @cache
    def launches(config, training):
        return cost(config, tokens=8, training=training).kernel_launches

    def measure(config, *, tokens, batch, dtype, training, **_):
        assert (tokens, batch, dtype) == (8, 1, torch.float32)
        n = launches(config, training)
        begin, issue = host[training]
        return MeasuredCost((begin + issue * n) * (10.0 if next(timings) % 5 == 3 else 1.0), 0)

    monkeypatch.setattr(machines, "measure", measure)
    machine = machines.add_host_times(PLAIN)
    assert machine.host_launch_s == pytest.approx({"forward": 0.25, "training": 0.5})
    assert machine.host_pass_s == pytest.approx({"forward": 7.0, "training": 11.0})
