"""Time from a machine's numbers: the ceiling of each kernel, and that a rate is measured as it is used."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clearhead.bench import machine as machines
from clearhead.bench.machine import Measured
from clearhead.costs import AttentionSizes, Machine, cost, preset
from clearhead.masks import window
from tests.costs.subjects import SUBJECTS
from tests.costs.test_operations import length

CPU = torch.device("cpu")
PLAIN = Machine("a", "cuda", {"float32": 1e6}, 1e18, 0.0)


def test_time_is_operations_and_bytes_and_launches():
    found = cost(AttentionSizes(64, 4), tokens=128)
    slow_arithmetic = Machine("a", "cpu", {"float32": 1e6}, 1e18, 0.0)
    slow_memory = Machine("b", "cpu", {"float32": 1e18}, 1e6, 0.0)
    assert found.time(slow_arithmetic).seconds == pytest.approx(found.forward.value / 1e6)
    assert found.time(slow_arithmetic).limit == "arithmetic"
    assert found.time(slow_memory).seconds == pytest.approx(found.traffic.value / 1e6)
    assert found.time(slow_memory).limit == "memory traffic"
    both = Machine("c", "cpu", {"float32": 1e6}, 1e6, 0.0)
    assert found.time(both).seconds == pytest.approx((found.forward.value + found.traffic.value) / 1e6)
    slow_launch = Machine("d", "cpu", {"float32": 1e18}, 1e18, 1.0)
    assert found.time(slow_launch).seconds == pytest.approx(5)  # four projections and one fused kernel
    assert found.time(slow_launch).limit == "launching kernels"


def test_products_with_an_odd_width_have_a_rate_of_their_own():
    """GPT-2's vocabulary of 50,257 is no multiple of 8; its projections are."""
    even, odd = (
        cost(preset("tiny-decoder").replace(vocab_size=vocabulary), tokens=13, training=True)
        for vocabulary in (104, 103)
    )
    slow = replace(PLAIN, odd_rate={"float32": 1e5})
    assert even.time(slow).seconds == even.time(PLAIN).seconds
    logits = 2 * 13 * 32 * 103  # forward; twice that backward
    added = 3 * logits * (1 / 1e5 - 1 / 1e6)
    assert odd.time(slow).seconds == pytest.approx(odd.time(PLAIN).seconds + added)
    slower = replace(slow, odd_backward_rate={"float32": 1e4})
    added += 2 * logits * (1 / 1e4 - 1 / 1e5)
    assert odd.time(slower).seconds == pytest.approx(odd.time(PLAIN).seconds + added)


def test_odd_products_are_named():
    assert cost("gpt2", tokens=13).odd_products == ("Decoder",)  # 50,257, of its logits
    assert cost("base", tokens=13).odd_products == ()  # 37,000


def test_sums_over_rows_have_a_rate_of_their_own():
    found = cost(AttentionSizes(64, 4), tokens=128, training=True)
    plain = Machine("a", "cuda", {"float32": 1e18}, 1e9, 0.0)
    slow = replace(plain, row_sum_rate={"float32": 1e8})
    added = 4 * 128 * 64 * 4 * (1 / 1e8 - 1 / 1e9)  # the gradients of four biases read (128, 64) numbers each
    assert found.time(slow).seconds == pytest.approx(found.time(plain).seconds + added)


def test_a_fast_device_waits_for_its_host():
    found = cost(AttentionSizes(64, 4), tokens=128)
    machine = Machine("a", "cuda", {"float32": 1e18}, 1e18, 0.0, issue={"forward": 0.25, "training": 1.0})
    assert found.n_launches == 5
    assert found.time(machine).seconds == pytest.approx(1.25)
    assert found.time(machine).limit == "issuing kernels"
    assert found.time(replace(machine, begin={"forward": 3.0})).seconds == pytest.approx(4.25)
    slow = replace(machine, matrix_rate={"float32": 1e6})
    # The first kernel has to be issued; all others are before their turn comes.
    assert found.time(slow).seconds == pytest.approx(found.forward.value / 1e6 + 0.25)
    assert found.time(slow).waiting == pytest.approx(0.25)
    assert found.time(slow).limit == "arithmetic"


@pytest.mark.parametrize("issue", [0.0, 1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "rnn"])
def test_kernels_run_as_they_are_issued(name, issue):
    """Against a clock for the host and one for the device, launch by launch."""
    found = cost(SUBJECTS[name], tokens=length(SUBJECTS[name], 13, 11), batch=3, training=True)
    machine = Machine("a", "cuda", {"float32": 1e9}, 1e9, 1e-5, issue={"training": issue}, begin={"training": 0.003})
    host, device, busy = 0.003, 0.0, 0.0
    for _, _, kernel in found.in_order():
        host += issue
        device = max(device, host) + sum(machine.seconds(kernel, torch.float32))
        busy += sum(machine.seconds(kernel, torch.float32))
    took = found.time(machine)
    assert took.seconds == pytest.approx(device)
    assert took.waiting == pytest.approx(device - busy)


def seconds_of_attention(found, forward, backward):
    """What is added when fused attention has these rates, and not the 1e6 of all products."""
    slow = replace(PLAIN, attention_rate={"float32": forward}, attention_backward_rate={"float32": backward})
    return found.time(slow).seconds - found.time(PLAIN).seconds


@pytest.mark.parametrize("impl", ["fused", "gathered"])
def test_fused_attention_has_rates_of_its_own(impl):
    """Two products forward; backward five, and seven where a plan makes scores and weights' gradients twice."""
    found = cost(AttentionSizes(64, 4), tokens=128, batch=3, training=True, mask=window(16, 0), impl=impl)
    assert found.pairs is not None
    product = 2 * 64 * found.pairs.computed.value
    back = 7 if impl == "gathered" else 5
    assert seconds_of_attention(found, 1e5, 1e6) == pytest.approx(2 * product * (1 / 1e5 - 1 / 1e6))
    assert seconds_of_attention(found, 1e6, 1e4) == pytest.approx(back * product * (1 / 1e4 - 1 / 1e6))


def test_the_equation_is_ordinary_products():
    found = cost(AttentionSizes(64, 4), tokens=128, training=True, impl="reference")
    assert seconds_of_attention(found, 1e3, 1e3) == 0


def test_a_machine_of_an_older_file_has_ordinary_rates():
    old = {"name": "a", "device": "cuda", "matrix_rate": {"float32": 1e6}, "bandwidth": 1e18, "launch": 0.0}
    new = replace(
        PLAIN,
        odd_rate={"float32": 1e6},
        attention_rate={"float32": 1e6},
        attention_backward_rate={"float32": 1e6},
    )
    found = cost("tiny-decoder", tokens=13, training=True)
    assert found.time(Machine.from_dict(old)) == found.time(new)
    assert Machine.from_dict(new.to_dict()) == new


# ---------------------------------------------------------------------- measuring


@pytest.fixture
def a_million_a_second(monkeypatch):
    """A clock that goes by the operations that torch counts: every call runs at 1e6 of them a second."""

    def time_of(call, **_):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops() / 1e6

    monkeypatch.setattr(machines, "time_of", time_of)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of a CPU is not counted; the plain steps are
        yield


@pytest.mark.usefixtures("a_million_a_second")
def test_rates_of_products_are_operations_by_time():
    assert machines._matrix_rate(CPU, torch.float32, 13) == pytest.approx(1e6)
    assert machines._odd_rates(CPU, torch.float32, 7, 11, 13) == pytest.approx((1e6, 1e6))


@pytest.mark.usefixtures("a_million_a_second")
def test_rates_of_attention_count_what_a_prediction_charges():
    """The plain steps keep the weights; fused, they are made again: five products backward in place of four."""
    batch, heads, tokens, width = 2, 3, 7, 5
    rates = machines._attention_rates(CPU, torch.float32, batch, heads, tokens, width)
    charged = cost(AttentionSizes(heads * width, heads), tokens=tokens, batch=batch, training=True)
    product = 2 * batch * heads * tokens**2 * width
    by_clock = {"forward": 2 * product / 1e6, "backward": 4 * product / 1e6}
    attend = next(part for part in charged.parts if part.name == "MultiHeadAttention")
    assert rates[0] * by_clock["forward"] == pytest.approx(attend.forward.value)
    assert rates[1] * by_clock["backward"] == pytest.approx(attend.backward.value)


def test_the_host_is_told_by_two_depths_and_not_by_its_slow_moments(monkeypatch):
    """A host that takes 7 s a pass and 0.25 s a kernel (forward), 11 s and 0.5 s (training); one timing in five
    is slow."""
    host = {False: (7.0, 0.25), True: (11.0, 0.5)}
    timings = count()

    @cache
    def launches(config, training):
        return cost(config, tokens=8, training=training).n_launches

    def measure(config, *, tokens, batch, dtype, training, **_):
        assert (tokens, batch, dtype) == (8, 1, torch.float32)
        n = launches(config, training)
        begin, issue = host[training]
        return Measured((begin + issue * n) * (10.0 if next(timings) % 5 == 3 else 1.0), 0)

    monkeypatch.setattr(machines, "measure", measure)
    found = machines.with_issue(PLAIN)
    assert found.issue == pytest.approx({"forward": 0.25, "training": 0.5})
    assert found.begin == pytest.approx({"forward": 7.0, "training": 11.0})
