"""The cost model's fit finds what is there, and costs are never negative; masks survive being spelled out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.attention.sparse import kernel
from clearhead.attention.sparse.compile import mask_to_expr
from clearhead.attention.sparse.cost_model import CPU, H200, rates_for
from clearhead.attention.sparse.plan import Blocking, plan
from clearhead.masks import blocks, causal, documents, every, padding, parse, window
from tests.support.mask_strategies import masks
from tools.calibrate import KINDS, Sample, fit, non_negative


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), rows=st.integers(3, 12), columns=st.integers(1, 5))
def test_least_squares_without_negative_numbers(seed, rows, columns):
    """By the conditions that only the solution meets: no slope where x > 0, and none downhill where x = 0."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    wanted = torch.randn(rows, generator=generator, dtype=torch.float64)
    x = non_negative(table, wanted)
    slope = table.T @ (table @ x - wanted)
    assert (x >= 0).all()
    torch.testing.assert_close(slope * (x > 0), torch.zeros_like(slope), atol=1e-9, rtol=0)
    assert (slope >= -1e-9).all()


@pytest.mark.parametrize("rates", [CPU, H200], ids=lambda rates: rates.name)
def test_the_fit_finds_the_rates_that_made_the_samples(rates):
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
            ms = rates.milliseconds(**pairs, **fixed, width=width, backward=training)
            # One call in ten is disturbed, and takes three times as long.
            ms *= 3 if number % 10 == 7 else 1
            samples.append(Sample("", width, training, ms, **pairs, **fixed))
    found = fit(samples, rates)
    for ours, theirs in ((found.forward, rates.forward), (found.training, rates.training)):
        for kind in KINDS:
            for width in (16, 128):
                cost = getattr(theirs, kind).of(width)
                assert abs(getattr(ours, kind).of(width) - cost) < 0.05 * cost, (kind, width)


@given(masks)
def test_a_mask_survives_being_spelled(mask):
    assert parse(mask_to_expr(mask)) == mask


def test_masks_with_tensors_are_not_spelled():
    assert mask_to_expr(padding([3, 5])) is None
    assert mask_to_expr(window(2, 2) & ~documents([0, 0, 1])) is None


def test_data_that_lies_elsewhere_is_copied_for_the_fused_kernel():
    made = plan(documents([0, 0, 1]) & window(1, 1), 3)
    assert made.fused_work(1)["moved"] == 0
    work = made.fused_work(1, torch.device("cuda"))
    assert work["moved"] == 1
    copied, there = (H200.milliseconds(**work | {"moved": moved}, width=64) for moved in (1, 0))
    assert copied - there == pytest.approx(H200.forward.moved)


def test_training_counts_the_lists_of_keys_too():
    """Each landmark is seen by all: a block of keys lists more queries than a block of queries lists keys."""
    made = plan(causal() & (blocks(128) | every(128, start=127)), 512, blocking=Blocking(64, 64, None, False))
    (queries,), (keys,) = made.query_pieces, made.key_pieces
    assert keys.pairs > 1.5 * queries.pairs
    forward, training = (made.work(3, H200, backward) for backward in (False, True))
    assert forward["full"] + forward["partial"] == 3 * queries.pairs
    assert training["full"] + training["partial"] == 1.5 * (queries.pairs + keys.pairs)
    assert forward["launches"] == training["launches"] == 1
    assert made.work(3, CPU, True) == made.work(3, CPU, False)  # which walks the lists of queries alone


def test_float32_on_a_gpu_gathers_only_what_is_sparse_enough():
    """It multiplies without tensor cores there: a pair takes longer than in the fused kernel, which bfloat16's
    does not."""
    gpu = torch.device("cuda")
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        blocking = kernel.blocking_on(gpu, dtype, 64, 64)
        plans = {mask: plan(mask, 4096, blocking=blocking) for mask in (window(64, 64), ~window(2, 2))}
        rates = rates_for(gpu, dtype)
        found[dtype] = [kernel.beats_sdpa(made, 32, 64, True, rates) for made in plans.values()]
    assert found == {torch.float32: [True, False], torch.bfloat16: [True, True]}
