"""Planning takes work and memory linear in the length; at full size a plan still says exactly what the mask says.

The tests count calls, torch operations and the bytes they write, per part of a plan: `python -m benchmarks sparse`
has the times (`plan_ms`). A mask as a tensor would take a byte for every pair: 16,384 for each of as many tokens.
`scattered` hashes every pair that it names, and has an allowance for that."""

from __future__ import annotations

import pytest
import torch

from clearhead.attention.sparse.plan import Blocking, plan
from clearhead.attention.sparse.registry import clear_plans
from clearhead.masks.catalogue import CATALOGUE
from tests.support.work_counters import Effort

BLOCKING = Blocking(64, 64, 1024, True, 128)
SHORT, LONG_LIST_COLUMNS = 1 << 14, 1 << 20
PATTERNS = {pattern.name: pattern for pattern in CATALOGUE}
# The masks with a `scattered`, and how many keys it names for a query.
NAMED = {"BigBird": 3, "random scatter": 16}


def assert_little_work(name, T):
    """For the queries' side, with all that comes before it, and for the keys' side after it."""
    mask = PATTERNS[name].mask(T)
    clear_plans()
    with Effort() as before:
        made = plan(mask, T, blocking=BLOCKING)
        _ = made.query_pieces
    with Effort() as after:
        _ = made.key_pieces
    for took in (before, after):
        assert took.operations < 4_000
        assert took.calls < 60_000 + T // 4
        assert took.nbytes < (2_500 + 350 * NAMED.get(name, 0)) * T
    return made


@pytest.mark.measured
@pytest.mark.parametrize("name", PATTERNS)
def test_sixteen_thousand_tokens(name):
    assert_little_work(name, SHORT)


@pytest.mark.measured
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in NAMED])
def test_a_million_tokens(name):
    assert assert_little_work(name, LONG_LIST_COLUMNS).nbytes < 32 * LONG_LIST_COLUMNS


@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_of_a_long_plan_see_what_the_mask_says(name):
    """Some blocks of each piece, from both sides, against the definition."""
    T = SHORT
    mask = PATTERNS[name].mask(T)
    made = plan(mask, T, blocking=BLOCKING)
    at = torch.arange(T)
    for by_key in (False, True):
        rows = torch.tensor([0, 63, 64, 5000, 8191, 8192, 12345, T - 1])
        p, j = (at[None], rows[:, None]) if by_key else (rows[:, None], at[None])
        wanted = mask.allows(p, j, keys=T).int()
        found = torch.zeros_like(wanted)
        if made.has_dense_causal:
            found += (j <= p).int()
        if made.dense_columns is not None:
            dense = (
                torch.isin(rows, made.dense_columns)[:, None] if by_key else torch.isin(at, made.dense_columns)[None]
            )
            found += dense.int()
        for lists in made.key_pieces if by_key else made.query_pieces:
            found += seen_by(lists, rows, T)
        assert torch.equal(found, wanted), by_key


def seen_by(lists, rows, T):
    """(rows, T) how often each row is given each column."""
    result = torch.zeros(len(rows), T, dtype=torch.int32)
    home = torch.full((T,), -1)
    every = lists.row_indices(torch.arange(lists.N))
    home[every[every >= 0]] = torch.arange(every.numel()).reshape(every.shape)[every >= 0]
    for number, row in enumerate(rows.tolist()):
        block, place = divmod(int(home[row]), lists.M)
        blocks = torch.tensor([block])
        columns = lists.columns(blocks, lists.max_length)
        allowed = lists.visible(blocks, lists.max_length)[0, place]
        result[number].index_add_(0, columns[0][allowed], torch.ones(int(allowed.sum()), dtype=torch.int32))
    return result
