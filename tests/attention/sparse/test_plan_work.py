"""Planning takes work and memory linear in the length, and a long plan matches its mask.

The tests count calls, torch operations and the bytes they write, per part of a plan; `python -m benchmarks sparse`
measures the times (`plan_ms`). A mask as a tensor would take one byte per pair: 16,384 per token for as many tokens.
`scattered` hashes every pair that it samples, and has an allowance for that."""

from __future__ import annotations

import pytest
import torch

from clearhead._core.caches import clear_caches
from clearhead.attention.sparse.plan import Blocking, plan
from clearhead.masks.catalogue import CATALOGUE
from tests.support.work_counters import Effort

BLOCKING = Blocking(64, 64, 1024, True, 128)
SHORT, LONG = 1 << 14, 1 << 20
PATTERNS = {pattern.name: pattern for pattern in CATALOGUE}
# The masks with a `scattered`, and its number of keys per query.
NAMED = {"BigBird": 3, "random scatter": 16}


def assert_little_work(name, T):
    """Check the work of the query index (with the common part of the plan), and of the key index after it."""
    mask = PATTERNS[name].mask(T)
    with Effort():
        _ = plan(mask, 256, blocking=BLOCKING).key_pieces  # imports modules at the first use
    clear_caches()
    with Effort() as before:
        mask_plan = plan(mask, T, blocking=BLOCKING)
        _ = mask_plan.query_pieces
    with Effort() as after:
        _ = mask_plan.key_pieces
    for took in (before, after):
        assert took.operations < 4_000
        assert took.calls < 60_000 + T // 4
        assert took.nbytes < (2_500 + 350 * NAMED.get(name, 0)) * T
    return mask_plan


@pytest.mark.measured
@pytest.mark.parametrize("name", PATTERNS)
def test_plan_of_16k_tokens_takes_linear_work(name):
    assert_little_work(name, SHORT)


@pytest.mark.measured
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in NAMED])
def test_plan_of_a_million_tokens_takes_linear_work(name):
    assert assert_little_work(name, LONG).nbytes < 32 * LONG


@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_of_a_long_plan_match_the_mask(name):
    """Compare some blocks of each piece, from both sides, with the definition."""
    T = SHORT
    mask = PATTERNS[name].mask(T)
    mask_plan = plan(mask, T, blocking=BLOCKING)
    at = torch.arange(T)
    for by_key in (False, True):
        rows = torch.tensor([0, 63, 64, 5000, 8191, 8192, 12345, T - 1])
        p, j = (at[None], rows[:, None]) if by_key else (rows[:, None], at[None])
        expected = mask.allows(p, j, keys=T).int()
        actual = torch.zeros_like(expected)
        if mask_plan.has_dense_causal:
            actual += (j <= p).int()
        if mask_plan.dense_columns is not None:
            dense = (
                torch.isin(rows, mask_plan.dense_columns)[:, None]
                if by_key
                else torch.isin(at, mask_plan.dense_columns)[None]
            )
            actual += dense.int()
        for lists in mask_plan.key_pieces if by_key else mask_plan.query_pieces:
            actual += visible_columns(lists, rows, T)
        assert torch.equal(actual, expected), by_key


def visible_columns(lists, rows, T):
    """Return (rows, T): how often each row sees each column."""
    result = torch.zeros(len(rows), T, dtype=torch.int32)
    position_of = torch.full((T,), -1)
    every = lists.row_indices(torch.arange(lists.N))
    position_of[every[every >= 0]] = torch.arange(every.numel()).reshape(every.shape)[every >= 0]
    for number, row in enumerate(rows.tolist()):
        block, place = divmod(int(position_of[row]), lists.M)
        blocks = torch.tensor([block])
        columns = lists.columns(blocks, lists.max_length)
        allowed = lists.visible(blocks, lists.max_length)[0, place]
        result[number].index_add_(0, columns[0][allowed], torch.ones(int(allowed.sum()), dtype=torch.int32))
    return result
