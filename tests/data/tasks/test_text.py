"""Windows over a text: every label is the next token, and validation predicts each token exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import (
    Batches,
    ConsecutiveWindows,
    FixedSize,
    LanguageModeling,
    RandomWindows,
    Task,
    WindowSplit,
    train_bpe,
)
from clearhead.data.tasks.text import read_text
from clearhead.errors import ConfigError, DataError


def _split(n, context, windows, seed=3):
    # Ids that tell their place, so that any window can be checked.
    return WindowSplit(torch.arange(n, dtype=torch.int32) + 10, context=context, windows=windows, seed=seed, pad_id=0)


kinds = st.sampled_from([RandomWindows(), ConsecutiveWindows(), ConsecutiveWindows(shifted=True)])


@given(st.integers(2, 97), st.integers(1, 23), kinds, st.integers(0, 5), st.integers(1, 4))
def test_batch_labels_are_the_next_ids(n, context, windows, epoch, multiple):
    split = _split(n, context, windows)
    batch = split.batch(torch.arange(len(split)), epoch=epoch, multiple=multiple)
    real = batch.weights.bool()
    assert torch.equal(batch.labels[real], batch.ids[real] + 1)
    assert int(batch.labels[real].max()) <= n + 9
    assert not batch.ids[~real].any()
    assert batch.n_labels == int(real.sum())
    assert torch.equal(split.lengths(epoch)[:, 0], batch.lengths)
    assert int(batch.lengths.min()) >= 1
    assert batch.ids.shape[1] == -(-context // multiple) * multiple


@given(st.integers(2, 97), st.integers(1, 23))
def test_consecutive_windows_predict_every_token_once(n, context):
    split = _split(n, context, ConsecutiveWindows())
    batch = split.batch(torch.arange(len(split)))
    assert sorted(batch.labels[batch.weights.bool()].tolist()) == list(range(11, n + 10))


@given(st.integers(50, 300), st.integers(1, 23), st.integers(0, 9))
def test_shifted_windows_are_full_and_consecutive(n, context, epoch):
    split = _split(n, context, ConsecutiveWindows(shifted=True))
    batch = split.batch(torch.arange(len(split)), epoch=epoch)
    if n > context:
        assert set(batch.lengths.tolist()) == {context}
    flat = batch.ids.flatten()
    assert torch.equal(flat, torch.arange(len(flat)) + flat[0])
    assert n - 1 - len(flat) < 2 * context


def test_random_windows_differ_by_epoch_and_cover_the_text():
    split = _split(103, 11, RandomWindows())
    first = split.batch(torch.arange(len(split)), epoch=0).ids[:, 0]
    assert not torch.equal(first, split.batch(torch.arange(len(split)), epoch=1).ids[:, 0])
    starts = torch.cat([split.batch(torch.arange(len(split)), epoch=e).ids[:, 0] for e in range(200)]) - 10
    assert set(starts.tolist()) == set(range(103 - 11))
    # One row alone is what it is among others.
    assert torch.equal(split.batch(torch.tensor([4]), epoch=0).ids[0, 0], first[4])


@pytest.mark.parametrize(
    ("windows", "starts"),
    [
        (RandomWindows(), [56, 84, 69, 70, 27, 80, 46, 10, 75, 38]),
        (ConsecutiveWindows(shifted=True), [4, 15, 26, 37, 48, 59, 70, 81]),
    ],
)
def test_window_starts_of_a_seed_are_stable_across_versions(windows, starts):
    # The starts that version 0.1.0 drew, so that a run of that version resumes with the same windows.
    split = _split(103, 11, windows, seed=7)
    assert (split.batch(torch.arange(len(split)), epoch=3).ids[:, 0] - 10).tolist() == starts
    assert split.to("cpu").batch(torch.arange(2), epoch=3).ids[1, 0] - 10 == starts[1]


def test_load_holds_out_the_last_tenth(tmp_path):
    path = tmp_path / "input.txt"
    text = "".join(chr(97 + i * 7 % 26) for i in range(999)) + "\n"
    path.write_text(text)
    task = LanguageModeling.load(tmp_path, context=31)
    assert isinstance(task, Task)
    assert task.tokenizer.decode(task.train.ids) == text[:900]
    assert task.tokenizer.decode(task.validation.ids) == text[900:]
    assert isinstance(task.train.windows, RandomWindows)
    assert str(task.report) == "input.txt: 1 of 1 rows are good."
    assert sum(batch.n_labels for batch in Batches(task.validation, FixedSize(2), shuffle=False)) == 99


def test_load_with_vocab_size_trains_bpe(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be\n\nthat is the question\n" * 20)
    tokenizer = train_bpe(path, 271)
    task = LanguageModeling.load(path, context=13, tokenizer=tokenizer, windows=ConsecutiveWindows())
    assert task.tokenizer.decode(task.train.ids) == path.read_text()[: int(len(path.read_text()) * 0.9)]


def test_read_text_is_exact_and_reports_invalid_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  two\nma\xf1ana\nthree")
    text, report = read_text(path)
    assert text == "one\n\n  two\nthree"
    assert str(report) == "a.txt: 4 of 5 rows are good; skipped: not UTF-8 1 (line 4)."
    path.write_bytes(b"one\n")
    assert read_text(path)[0] == "one\n"
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="0 of 1 rows are good"):
        read_text(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="0 of 0 rows are good"):
        read_text(path)


def test_load_invalid_arguments_raise(tmp_path):
    with pytest.raises(ConfigError, match="context is 0; expected a whole number of at least 1"):
        _split(10, 0, ConsecutiveWindows())
    with pytest.raises(DataError, match="a text of 1 tokens has nothing to predict"):
        _split(1, 5, ConsecutiveWindows())
    (tmp_path / "a.txt").write_text("abc" * 10)
    with pytest.raises(ConfigError, match=r"hold_out is 0\.0; expected a number above 0 and below 1"):
        LanguageModeling.load(tmp_path / "a.txt", hold_out=0.0)
