"""Batches: groups within the budget, padding, order, resuming and division among processes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead._core.counter_rng import permutation
from clearhead.data import Batches, FixedSize, PairBatch, Ragged, TokenBatch, TokenBudget
from clearhead.data.batch import Split
from clearhead.data.packing import length_mask
from clearhead.errors import ConfigError, DataError


class Rows(Split[TokenBatch]):
    """Rows of given lengths (one or two sides); row r holds the number r all along."""

    def __init__(self, lengths):
        self._lengths = torch.tensor(lengths).reshape(len(lengths), -1)

    def __len__(self):
        return len(self._lengths)

    def lengths(self, epoch=0):
        return self._lengths

    def batch(self, rows, *, epoch=0, multiple=1):
        n = self._lengths[rows, 0]
        width = -(-int(n.max()) // multiple) * multiple
        ids = rows[:, None].expand(-1, width)
        return TokenBatch(
            ids=ids,
            lengths=n,
            labels=ids,
            weights=length_mask(n, width).float(),
            n_tokens=int(n.sum()),
            n_padded=ids.numel(),
            n_labels=int(n.sum()),
        )

    def to(self, device):
        return self


def _numbers(batches):
    return [batch.ids[:, 0].tolist() for batch in batches]


def _flat(lists):
    return list(itertools.chain.from_iterable(lists))


pair_lengths = st.lists(st.tuples(st.integers(1, 23), st.integers(1, 19)), min_size=1, max_size=97)


@given(pair_lengths, st.integers(42, 211), st.integers(1, 8), st.one_of(st.none(), st.integers(1, 50)))
def test_token_budget_groups_contain_every_row_once_within_the_budget(lengths, budget, multiple, pool):
    size = TokenBudget(budget, multiple=multiple, pool=pool)
    lengths = torch.tensor(lengths)
    widths = -(-lengths // multiple) * multiple
    groups = size.groups(lengths, torch.randperm(len(lengths)))
    for rows in groups:
        assert len(rows) * int(widths[rows].amax(0).sum()) <= budget
    fits = (widths.sum(1) <= budget).nonzero().flatten().tolist()
    assert sorted(torch.cat(groups).tolist() if groups else []) == fits


def test_token_budget_groups_are_maximal():
    lengths = torch.randint(1, 31, (499, 2))
    size = TokenBudget(211)
    groups = size.groups(lengths, torch.arange(499))
    for rows, following in itertools.pairwise(groups):
        joined = torch.cat([rows, following[:1]])
        assert len(joined) * int(lengths[joined].amax(0).sum()) > 211


def test_statistics_padding_is_small():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 41, (4001, 2), generator=generator)
    lengths[:, 1] = (lengths[:, 0] + torch.randint(-2, 3, (4001,), generator=generator)).clamp(min=1)
    sorted_ = Batches(Rows(lengths.tolist()), TokenBudget(1999)).statistics()
    assert sorted_.n_examples == 4001
    assert sorted_.n_tokens == int(lengths.sum())
    assert sorted_.padding < 0.04
    # As a comparison the same rows without any sorting: a pool of one.
    unsorted = Batches(Rows(lengths.tolist()), TokenBudget(1999, pool=1)).statistics()
    assert unsorted.padding > 0.4
    assert sorted_.n_batches < unsorted.n_batches
    assert f"{sorted_.padding:.2%} padding" in str(sorted_)


def test_statistics_equal_sums_over_batches():
    batches = Batches(Rows([[n] for n in range(1, 60)]), TokenBudget(101, multiple=4), seed=7)
    counted = batches.statistics()
    batch_list = list(batches)
    assert counted.n_batches == len(batch_list)
    assert counted.n_tokens == sum(batch.n_tokens for batch in batch_list)
    assert counted.n_padded == sum(batch.n_padded for batch in batch_list)
    assert counted.padding == pytest.approx(1 - counted.n_tokens / counted.n_padded)


def test_token_budget_rows_over_the_budget_are_skipped_and_counted():
    batches = Batches(Rows([[3], [50], [5], [51]]), TokenBudget(47))
    assert sorted(_flat(_numbers(batches))) == [0, 2]
    batches = Batches(Rows([[3], [50], [5], [51]]), TokenBudget(47))
    assert batches.statistics().n_skipped == 2
    assert "2 over the budget skipped" in str(batches.statistics())
    with pytest.raises(DataError, match=r"no batch can be made: .*2 over the budget skipped"):
        Batches(Rows([[50], [51]]), TokenBudget(47))


def test_batches_order_depends_on_seed_and_epoch_only():
    split = Rows([[1 + r % 13] for r in range(211)])
    batches = Batches(split, TokenBudget(61), seed=5)
    first, second = _numbers(batches), _numbers(batches)
    assert batches.epoch == 2
    assert first != second
    assert sorted(_flat(first)) == sorted(_flat(second)) == list(range(211))
    assert _numbers(Batches(split, TokenBudget(61), seed=5)) == first
    assert _numbers(Batches(split, TokenBudget(61), seed=6)) != first
    plain = Batches(split, FixedSize(10), shuffle=False)
    assert _flat(_numbers(plain)) == list(range(211))
    assert len(plain) == 22


def test_batches_order_is_equal_in_another_process():
    code = (
        "import torch; from clearhead.data import TokenBudget; from clearhead._core.counter_rng import permutation;"
        "g = TokenBudget(61).groups(torch.arange(211)[:, None] % 13 + 1, permutation(211, 101, 5, 3));"
        "print([r.tolist() for r in g])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    groups = TokenBudget(61).groups(torch.arange(211)[:, None] % 13 + 1, permutation(211, 101, 5, 3))
    assert other.stdout == f"{[rows.tolist() for rows in groups]}\n"


@pytest.mark.parametrize("size", [TokenBudget(61), FixedSize(7)])
@pytest.mark.parametrize("n_batches", [0, 1, 17, 31, 45])
def test_batches_resumed_continue_with_the_next_batch(size, n_batches):
    split = Rows([[1 + r % 13] for r in range(211)])
    unbroken = Batches(split, size, seed=5)
    stream = unbroken.forever()
    for _ in range(n_batches):
        next(stream)
    state = unbroken.state_dict()
    expected = [next(stream).ids[:, 0].tolist() for _ in range(50)]
    resumed = Batches(split, size, seed=5)
    resumed.load_state_dict(state)
    again = resumed.forever()
    assert [next(again).ids[:, 0].tolist() for _ in range(50)] == expected


def test_batches_interrupted_iteration_continues():
    batches = Batches(Rows([[1]] * 23), FixedSize(5))
    first = next(iter(batches)).ids[:, 0].tolist()
    remainder = _numbers(batches)
    assert len(remainder) == 4
    assert sorted(first + _flat(remainder)) == list(range(23))
    assert (batches.epoch, batches.position) == (1, 0)


def test_load_state_dict_of_another_run_raises_config_error():
    split = Rows([[1]] * 23)
    state = Batches(split, FixedSize(5), seed=1).state_dict()
    for other, word in [
        (Batches(split, FixedSize(5), seed=2), "seed 1, expected 2"),
        (Batches(split, FixedSize(6), seed=1), r"size FixedSize\(examples=5"),
        (Batches(Rows([[1]] * 22), FixedSize(5), seed=1), "examples 23, expected 22"),
    ]:
        with pytest.raises(ConfigError, match=word):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match="lacks position, seed, shuffle, size"):
        Batches(split, FixedSize(5)).load_state_dict({"epoch": 0, "examples": 23})
    with pytest.raises(ConfigError, match="expected a whole number of at least 0"):
        Batches(split, FixedSize(5), seed=1).load_state_dict({**state, "position": -1})


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 9))
def test_batches_of_all_processes_equal_one_process(world, n, count):
    split = Rows([[1 + r % 13] for r in range(n)])
    single_process = list(Batches(split, FixedSize(count), seed=3))
    parts = [list(Batches(split, FixedSize(count), seed=3, rank=rank, world=world)) for rank in range(world)]
    assert {len(part) for part in parts} == {len(single_process)}
    for i, batch in enumerate(single_process):
        shares = [part[i] for part in parts]
        rows = [row for share in shares if share.n_labels for row in share.ids[:, 0].tolist()]
        assert sorted(rows) == sorted(batch.ids[:, 0].tolist())
        assert sum(share.n_labels for share in shares) == batch.n_labels
        # The weights agree with the counts: a process without rows contributes zero.
        assert sum(float(share.weights.sum()) for share in shares) == float(batch.weights.sum())


def test_batches_of_two_processes_resume_in_one():
    split = Rows([[1]] * 41)
    two = [Batches(split, FixedSize(6), seed=3, rank=rank, world=2) for rank in range(2)]
    streams = [iter(batches) for batches in two]
    for _ in range(3):
        for stream in streams:
            next(stream)
    resumed = Batches(split, FixedSize(6), seed=3)
    resumed.load_state_dict(two[0].state_dict())
    following = next(iter(resumed)).ids[:, 0].tolist()
    shares = [next(stream).ids[:, 0].tolist() for stream in streams]
    assert [following[0::2], following[1::2]] == shares


def test_batches_invalid_arguments_raise_config_error():
    with pytest.raises(ConfigError, match="rank 2 of world 2: expected 0 ≤ rank < world"):
        Batches(Rows([[1]]), FixedSize(1), rank=2, world=2)
    with pytest.raises(ConfigError, match="TokenBudget: budget is 0; expected a whole number of at least 1"):
        TokenBudget(0)
    with pytest.raises(ConfigError, match="FixedSize: examples is 0; expected a whole number of at least 1"):
        FixedSize(0)


rows_of_ids = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), min_size=1, max_size=17)


@given(rows_of_ids, st.data())
def test_padded_contains_the_rows_and_the_fill_value(rows, data):
    ragged = Ragged.of(rows)
    assert [ragged[i] for i in range(len(rows))] == rows
    choice = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=7))
    skip, drop, multiple = (
        data.draw(st.integers(0, 2)),
        data.draw(st.integers(0, 2)),
        data.draw(st.integers(1, 5)),
    )
    ids, lengths = ragged.padded(torch.tensor(choice), fill=7, skip=skip, drop=drop, multiple=multiple)
    expected = [rows[i][skip : max(skip, len(rows[i]) - drop)] for i in choice]
    width = -(-max(map(len, expected)) // multiple) * multiple
    assert ids.tolist() == [row + [7] * (width - len(row)) for row in expected]
    assert lengths.tolist() == [len(row) for row in expected]
    picked = ragged.select(torch.tensor(choice))
    assert [picked[i] for i in range(len(choice))] == [rows[i] for i in choice]


def _pair_batch():
    return PairBatch(
        source=torch.tensor([[5, 6, 2]]),
        source_lengths=torch.tensor([3]),
        target=torch.tensor([[1, 7]]),
        target_lengths=torch.tensor([2]),
        labels=torch.tensor([[7, 2]]),
        weights=torch.ones(1, 2),
        n_tokens=5,
        n_padded=5,
        n_labels=2,
    )


def test_batch_to_moves_all_tensors_and_batch_is_frozen():
    batch = _pair_batch()
    moved = batch.to("meta")
    tensors = [
        moved.source,
        moved.source_lengths,
        moved.target,
        moved.target_lengths,
        moved.labels,
        moved.weights,
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (moved.n_tokens, moved.n_labels, len(moved)) == (5, 2, 1)
    with pytest.raises(AttributeError):
        batch.n_tokens = 3
    quiet = batch.with_zero_weight()
    assert (quiet.n_tokens, quiet.n_labels, float(quiet.weights.sum())) == (0, 0, 0.0)
    assert torch.equal(quiet.source, batch.source)


def test_pair_batch_logits_passes_a_padding_mask():
    arguments = {}

    def model(source, target, *, source_mask):
        arguments.update(source=source, target=target, mask=source_mask.dense(2, 3, query_offset=0))
        return torch.zeros(1, 2, 11)

    batch = _pair_batch()
    short = PairBatch(**{**batch.__dict__, "source_lengths": torch.tensor([2])})
    assert short.logits(model).shape == (1, 2, 11)
    assert arguments["source"] is batch.source
    assert arguments["target"] is batch.target
    assert arguments["mask"].reshape(2, 3).tolist() == [[True, True, False]] * 2
