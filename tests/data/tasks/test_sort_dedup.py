"""Sorting without repeats, compared with sorted(set(…)); training never uses held-out inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import Batches, SortDedup, Task, TokenBudget
from clearhead.data.tasks.sort_dedup import alphabet, is_held_out, make_batch, sorted_without_repeats, vocabulary
from clearhead.errors import ConfigError, DataError


def test_make_batch_equals_the_example_of_the_exam():
    tokenizer = vocabulary(4)
    letters = torch.tensor([tokenizer.encode("D A A")])
    batch = make_batch(letters, torch.tensor([3]), tokenizer)
    assert tokenizer.tokens(batch.ids[0]) == ["D", "A", "A", "<START>", "A", "D"]
    assert tokenizer.tokens(batch.labels[0]) == ["A", "A", "<START>", "A", "D", "<STOP>"]
    # The loss is on A, D and <STOP> alone.
    assert batch.weights[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert (batch.n_labels, batch.n_tokens, batch.n_padded) == (3, 6, 6)


def test_alphabet_continues_after_z():
    names = alphabet(26 + 26 * 26 + 1)
    assert [*names[:3], *names[25:28], names[51], names[52], names[-2], names[-1]] == [
        *("A", "B", "C"),
        *("Z", "AA", "AB"),
        "AZ",
        "BA",
        "ZZ",
        "AAA",
    ]
    assert len(set(names)) == len(names)


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=11), min_size=1, max_size=7), st.integers(1, 5))
def test_batch_labels_equal_sorted_set(rows, multiple):
    width = max(map(len, rows))
    # Letters beyond a row's length are noise, which must not change the result.
    letters = torch.tensor([row + [(len(row) * 5) % 13] * (width - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    output, n_out = sorted_without_repeats(letters, lengths)
    tokenizer = vocabulary(13)
    batch = make_batch(letters, lengths, tokenizer, multiple=multiple)
    for i, row in enumerate(rows):
        answer = sorted(set(row))
        assert output[i, : int(n_out[i])].tolist() == answer
        tokens = [*row, tokenizer.bos_id, *answer, tokenizer.eos_id]
        pad = [tokenizer.pad_id] * (batch.ids.shape[1] + 1 - len(tokens))
        assert batch.ids[i].tolist() == [*tokens[:-1], *pad]
        assert batch.labels[i].tolist() == [*tokens[1:], *pad]
        assert batch.weights[i].tolist() == [0.0] * len(row) + [1.0] * (len(answer) + 1) + [0.0] * len(pad)
    assert batch.n_labels == int(batch.weights.sum())
    assert batch.n_tokens == int(batch.lengths.sum()) == sum(len(row) + 1 + len(set(row)) for row in rows)
    assert batch.ids.shape[1] % multiple == 0


def _inputs(split, rows, epoch=0):
    letters, lengths = split.letters(rows, epoch)
    return [tuple(row[:n]) for row, n in zip(letters.tolist(), lengths.tolist(), strict=True)]


@pytest.fixture(scope="module")
def small():
    # Few enough different inputs that an input of validation would certainly turn up in training by chance.
    return SortDedup(n_symbols=5, max_length=4, n_train=4001, n_validation=13, seed=1)


def test_train_batches_contain_no_held_out_input(small):
    assert isinstance(small, Task)
    held = set(_inputs(small.validation, torch.arange(len(small.validation))))
    assert len(held) == len(small.validation) == 13
    trained = set()
    for epoch in range(3):
        rows = _inputs(small.train, torch.arange(len(small.train)), epoch)
        trained |= set(rows)
    assert not held & trained
    # Nearly all of the other inputs are seen: 5 + 25 + 125 + 625 there are.
    assert len(trained) > 0.9 * 780 * 31 / 32


def test_is_held_out_depends_on_the_letters_only():
    letters = torch.randint(0, 26, (3001, 17))
    lengths = torch.randint(1, 18, (3001,))
    held = is_held_out(letters, lengths)
    noisy = letters.clone()
    noisy[torch.arange(17) >= lengths[:, None]] = 3
    assert torch.equal(is_held_out(noisy, lengths), held)
    assert torch.equal(is_held_out(noisy[:101, :], lengths[:101]), held[:101])
    assert 0.5 / 32 < float(held.float().mean()) < 2 / 32


def test_example_depends_on_seed_epoch_and_row_only(small):
    some = small.train.batch(torch.tensor([17, 3]), epoch=2)
    alone = small.train.batch(torch.tensor([3]), epoch=2)
    n = int(alone.lengths[0])
    assert some.ids[1, :n].tolist() == alone.ids[0, :n].tolist()
    everything = torch.arange(101)
    assert _inputs(small.train, everything, 0) != _inputs(small.train, everything, 1)
    other = SortDedup(n_symbols=5, max_length=4, n_train=4001, n_validation=13, seed=2)
    assert _inputs(small.train, everything) != _inputs(other.train, everything)


def test_lengths_equal_those_of_the_batches(small):
    lengths = small.train.lengths(1)
    batch = small.train.batch(torch.arange(len(small.train)), epoch=1)
    assert torch.equal(lengths[:, 0], batch.lengths)
    batches = Batches(small.train, TokenBudget(997))
    assert sum(len(batch) for batch in batches) == 4001
    assert batches.statistics().padding < 0.05


def test_train_contains_all_lengths_except_unseen_ones():
    task = SortDedup(n_symbols=29, max_length=7, unseen_lengths=[3, 6], n_train=2003, n_validation=211)
    letters, lengths = task.train.letters(torch.arange(2003))
    assert sorted(set(lengths.tolist())) == [1, 2, 4, 5, 7]
    assert sorted(set(letters.flatten().tolist())) == list(range(29))
    unseen = {len(row) for row in _inputs(task.validation, torch.arange(211))}
    assert {3, 6} <= unseen
    assert task.tokenizer.vocab_size == 29 + 3


def test_narrow_inputs_have_more_repeats():
    def distinct(narrow):
        task = SortDedup(max_length=23, narrow=narrow, n_train=503, n_validation=7)
        letters, lengths = task.train.letters(torch.arange(503))
        return float((sorted_without_repeats(letters, lengths)[1] / lengths).mean())

    assert distinct(1.0) < 0.8 * distinct(0.0)


def test_sort_dedup_invalid_arguments_raise():
    with pytest.raises(DataError, match="too few distinct inputs for validation"):
        SortDedup(n_symbols=1, max_length=1)
    with pytest.raises(ConfigError, match="no length remains"):
        SortDedup(max_length=2, unseen_lengths=[1, 2])
    with pytest.raises(ConfigError, match="n_symbols is 0; expected a whole number of at least 1"):
        SortDedup(n_symbols=0)
    with pytest.raises(ConfigError, match=r"narrow is 1\.5; expected a number of at least 0 and at most 1"):
        SortDedup(narrow=1.5)
