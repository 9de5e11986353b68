"""The fit of the cost model recovers known rates, costs are non-negative, and masks convert to text and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.attention.sparse import kernel
from clearhead.attention.sparse.compile import static_text
from clearhead.attention.sparse.cost_model import CPU, H200, AttentionWork, rates_for
from clearhead.attention.sparse.plan import Blocking, plan
from clearhead.masks import blocks, causal, documents, every, padding, parse, window
from tests.support.mask_strategies import masks
from tools.calibrate import KINDS, Sample, fit, non_negative


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), rows=st.integers(3, 12), columns=st.integers(1, 5))
def test_non_negative_meets_optimality_conditions(seed, rows, columns):
    """The KKT conditions hold: the gradient is zero where x > 0 and non-negative where x = 0."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    target = torch.randn(rows, generator=generator, dtype=torch.float64)
    x = non_negative(table, target)
    slope = table.T @ (table @ x - target)
    assert (x >= 0).all()
    torch.testing.assert_close(slope * (x > 0), torch.zeros_like(slope), atol=1e-9, rtol=0)
    assert (slope >= -1e-9).all()


@pytest.mark.parametrize("rates", [CPU, H200], ids=lambda rates: rates.name)
def test_fit_recovers_rates_of_generated_samples(rates):
    generator = torch.Generator().manual_seed(7)
    samples = []
    for number in range(40):
        width = (16, 64, 128)[number % 3]
        pairs = dict.fromkeys(KINDS, 0.0)
        for kind in [("dense",), ("masked",), ("full", "partial"), ("dense", "partial")][number % 4]:
            pairs[kind] = float(torch.randint(1, 10**9, (), generator=generator))
        fixed = {
            "launches": 1 + number % 5,
            "leaves": number % 3,
            "scattered": number % 2,
            "moved": number // 20,
        }
        for training in (False, True):
            work = AttentionWork(**pairs, **fixed)
            ms = rates.milliseconds(work, width=width, backward=training)
            # One call in ten is disturbed, and takes three times as long.
            ms *= 3 if number % 10 == 7 else 1
            samples.append(Sample("", width, training, ms, work))
    fitted = fit(samples, rates)
    for actual, expected in ((fitted.forward, rates.forward), (fitted.training, rates.training)):
        for kind in KINDS:
            for width in (16, 128):
                cost = getattr(expected, kind).of(width)
                assert abs(getattr(actual, kind).of(width) - cost) < 0.05 * cost, (kind, width)


def test_work_adds_by_quantity():
    total = AttentionWork(full=3.0, launches=1) + AttentionWork(full=4.0, partial=5.0, launches=0.5)
    assert total == AttentionWork(full=7.0, partial=5.0, launches=1.5)


@given(masks)
def test_static_text_is_parsed_to_an_equal_mask(mask):
    assert parse(static_text(mask)) == mask


def test_static_text_of_tensors_is_none():
    assert static_text(padding([3, 5])) is None
    assert static_text(window(2, 2) & ~documents([0, 0, 1])) is None


def test_fused_work_counts_data_on_another_device():
    mask_plan = plan(documents([0, 0, 1]) & window(1, 1), 3)
    assert mask_plan.fused_work(1).moved == 0
    work = mask_plan.fused_work(1, torch.device("cuda"))
    assert work.moved == 1
    copied, local = (H200.milliseconds(replace(work, moved=moved), width=64) for moved in (1, 0))
    assert copied - local == pytest.approx(H200.forward.moved)


def test_work_of_training_counts_the_key_index():
    """Every query sees each landmark, so a block of keys lists more queries than a block of queries lists keys."""
    mask_plan = plan(causal() & (blocks(128) | every(128, start=127)), 512, blocking=Blocking(64, 64, None, False))
    (queries,), (keys,) = mask_plan.query_pieces, mask_plan.key_pieces
    assert keys.pairs > 1.5 * queries.pairs
    forward, training = (mask_plan.work(3, H200, backward) for backward in (False, True))
    assert forward.full + forward.partial == 3 * queries.pairs
    assert training.full + training.partial == 1.5 * (queries.pairs + keys.pairs)
    assert forward.launches == training.launches == 1
    assert mask_plan.work(3, CPU, True) == mask_plan.work(3, CPU, False)  # which uses the index of the queries only


def test_beats_sdpa_in_float32_requires_a_sparser_mask():
    """Without tensor cores, a pair takes longer in the sparse kernel than in SDPA; in bfloat16 it does not."""
    gpu = torch.device("cuda")
    choices = {}
    for dtype in (torch.float32, torch.bfloat16):
        blocking = kernel.blocking_on(gpu, dtype, 64, 64)
        plans = {mask: plan(mask, 4096, blocking=blocking) for mask in (window(64, 64), ~window(2, 2))}
        rates = rates_for(gpu, dtype)
        choices[dtype] = [kernel.beats_sdpa(mask_plan, 32, 64, True, rates) for mask_plan in plans.values()]
    assert choices == {torch.float32: [True, False], torch.bfloat16: [True, True]}


@pytest.mark.parametrize("backward", [False, True])
def test_predicted_time_of_a_small_call_is_its_host_time(backward):
    costs = H200.training if backward else H200.forward
    plain, masked = AttentionWork(dense=10.0), AttentionWork(masked=10.0, leaves=2)
    assert H200.sdpa_ms(plain, width=64, backward=backward) == costs.sdpa_host
    assert H200.sdpa_ms(masked, width=64, backward=backward) == costs.sdpa_host + 2 * costs.leaf_host
    assert H200.interval_ms(pairs=10, rows=1, width=64, backward=backward) == costs.interval_host


def test_predicted_time_of_a_large_call_is_its_device_time():
    work = AttentionWork(masked=1e11, leaves=2)
    assert H200.sdpa_ms(work, width=64, backward=True) == H200.milliseconds(work, width=64, backward=True)
    assert H200.interval_ms(pairs=1e11, rows=1e6, width=64, backward=True) > 100 * H200.training.interval_host
