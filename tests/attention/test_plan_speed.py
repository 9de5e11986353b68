"""Planning is fast and takes memory linear in the length; at full size a plan still says exactly what the mask says.

The targets on one core are 20 ms at 16,384 tokens and 0.5 s at 1,048,576 for each side of a plan, for masks with
structure. `python -m tests.attention.test_plan_speed` prints how long the catalogue takes. The tests allow several
times as much, because machines are shared. `scattered` hashes every pair that it names (about 0.2 µs each): it has a
bound of its own."""

from __future__ import annotations

import time

import pytest
import torch

from clearhead.attention.plan import Blocking, forget, plan
from clearhead.bench.sparse_masks import CATALOGUE

BLOCKING = Blocking(64, 64, 1024, True, 128)
SHORT, LONG = 1 << 14, 1 << 20
NOISE = 5
PATTERNS = {pattern.name: pattern for pattern in CATALOGUE}
NAMED = {
    "BigBird": 3,
    "random scatter": 16,
}  # the masks with a `scattered`, and how many keys it names for a query


def seconds(mask, T, repeats):
    """The best of a few: for the queries' side, with all that comes before it, and for the keys' side after it."""
    times = []
    for _ in range(repeats):
        forget()
        begin = time.perf_counter()
        made = plan(mask, T, blocking=BLOCKING)
        _ = made.queries
        middle = time.perf_counter()
        _ = made.keys
        times.append((middle - begin, time.perf_counter() - middle))
    return [min(side) for side in zip(*times, strict=True)], made.nbytes


@pytest.mark.measured
@pytest.mark.parametrize("name", PATTERNS)
def test_sixteen_thousand_tokens(name):
    (queries, keys), _ = seconds(PATTERNS[name].mask(SHORT), SHORT, 4)
    hashing = 0.2e-6 * SHORT * NAMED.get(name, 0)
    assert queries < NOISE * (0.020 + hashing)
    assert keys < NOISE * 0.020


@pytest.mark.measured
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in NAMED])
def test_a_million_tokens(name):
    (queries, keys), nbytes = seconds(PATTERNS[name].mask(LONG), LONG, 1)
    assert queries < NOISE * 0.5
    assert keys < NOISE * 0.5
    assert nbytes < 32 * LONG


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
        if made.triangle:
            found += (j <= p).int()
        if made.columns is not None:
            dense = torch.isin(rows, made.columns)[:, None] if by_key else torch.isin(at, made.columns)[None]
            found += dense.int()
        for lists in made.keys if by_key else made.queries:
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
        columns = lists.columns(blocks, lists.longest)
        allowed = lists.allowed(blocks, lists.longest)[0, place]
        result[number].index_add_(0, columns[0][allowed], torch.ones(int(allowed.sum()), dtype=torch.int32))
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{'':30} {'16,384: queries':>16} {'keys':>8} {'1,048,576: queries':>20} {'keys':>8}")
    for name, pattern in PATTERNS.items():
        cells = [f"{1e3 * t:.1f} ms" for t in seconds(pattern.mask(SHORT), SHORT, 4)[0]]
        if name not in NAMED:
            cells += [f"{1e3 * t:.0f} ms" for t in seconds(pattern.mask(LONG), LONG, 2)[0]]
        print(f"{name:30} " + " ".join(f"{c:>{w}}" for c, w in zip(cells, (16, 8, 20, 8), strict=False)))
