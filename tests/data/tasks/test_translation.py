"""Translation: valid and skipped rows, batches, and the division into training and validation."""

from __future__ import annotations

import lzma

import pytest
import torch

from clearhead.data import Batches, PairSplit, Task, TokenBudget, TranslationTask, encode_sources, read_pairs, train_bpe
from clearhead.data.tasks.translation import divide
from clearhead.errors import ConfigError, DataError, StorageError

GOOD = [("Go.", "Ve."), ("Hello world!", "¡Hola mundo!"), ("I ran a long way.", "Corrí un largo camino.")]


def _write(path, rows):
    path.write_text("".join(f"{a}\t{b}\tattribution\n" for a, b in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([side for pair in GOOD for side in pair], 270)


def _sentences(n):
    return [(f"number {i} of them", f"el número {i * 7 % 101} de {i}") for i in range(n)]


def test_read_pairs_reports_skipped_lines(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(
        "\ufeffGo.\tVe.\r\n".encode()
        + b"no tab here\n"
        + b"\tempty source\n"
        + b"empty target\t \textra\n"
        + b"latin-1\tma\xf1ana\n"
        + b"long\t"
        + b"x" * 70_000
        + b"\n\n"
        + b"Hello\tHola\tthird\tfourth"
    )
    pairs = read_pairs(path)
    assert pairs.sources == ["Go.", "Hello"]
    assert pairs.targets == ["Ve.", "Hola"]
    assert pairs.lines == [1, 8]
    assert str(pairs.report) == (
        "pairs.tsv: 2 of 8 rows are good; skipped: no tab 2 (lines 2, 7); empty side 2 (lines 3, 4); "
        "not UTF-8 1 (line 5); too long 1 (line 6)."
    )
    assert read_pairs(path, swap=True).sources == ["Ve.", "Hola"]


@pytest.mark.parametrize("content", [b"", b"\n", b"no tab\n", b"\xff\t\xfe\n"])
def test_read_pairs_without_valid_row_raises_data_error(tmp_path, content):
    (tmp_path / "bad.tsv").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.tsv: 0 of . rows are good.*expected at least one valid row"):
        read_pairs(tmp_path / "bad.tsv")


def test_pair_split_skips_and_reports_long_pairs(tmp_path, tokenizer):
    _write(tmp_path / "pairs.tsv", [*GOOD, ("word " * 40, "a"), ("b", "palabra " * 40)])
    split = PairSplit(read_pairs(tmp_path / "pairs.tsv"), tokenizer, max_tokens=31)
    assert len(split) == 3
    assert "too long 2 (lines 4, 5)" in str(split.report)
    assert [split.sources[0], split.targets[2]] == ["Go.", "Corrí un largo camino."]
    with pytest.raises(DataError, match="all 5 pairs have a side of more than 1 tokens; increase max_tokens"):
        PairSplit(read_pairs(tmp_path / "pairs.tsv"), tokenizer, max_tokens=1)


def test_pair_batch_contains_only_the_sentences(tmp_path, tokenizer):
    split = PairSplit(read_pairs(_write(tmp_path / "p.tsv", GOOD)), tokenizer, max_tokens=97)
    batch = split.batch(torch.tensor([2, 0, 1]), multiple=4)
    t = tokenizer
    for row, number in enumerate([2, 0, 1]):
        source, target = t.encode(GOOD[number][0]), t.encode(GOOD[number][1])
        n, m = int(batch.source_lengths[row]), int(batch.target_lengths[row])
        assert batch.source[row, :n].tolist() == [*source, t.eos_id]
        assert batch.target[row, :m].tolist() == [t.bos_id, *target]
        assert batch.labels[row, :m].tolist() == [*target, t.eos_id]
        assert set(batch.source[row, n:].tolist()) <= {t.pad_id}
        assert set(batch.target[row, m:].tolist()) | set(batch.labels[row, m:].tolist()) <= {t.pad_id}
        assert batch.weights[row].tolist() == [1.0] * m + [0.0] * (batch.labels.shape[1] - m)
    assert batch.source.shape[1] % 4 == batch.target.shape[1] % 4 == 0
    assert batch.n_labels == int(batch.weights.sum()) == int(batch.target_lengths.sum())
    assert batch.n_tokens == int(batch.source_lengths.sum() + batch.target_lengths.sum())
    assert batch.n_padded == batch.source.numel() + batch.target.numel()
    assert split.lengths().tolist()[0] == [len(t.encode("Go.")) + 1, len(t.encode("Ve.")) + 1]
    assert encode_sources(t, ["Go."])[0] == [*t.encode("Go."), t.eos_id]


def test_epoch_contains_every_pair_once_within_the_budget(tmp_path):
    pairs = _write(tmp_path / "p.tsv", _sentences(301))
    task = TranslationTask.load(pairs, vocab_size=300, hold_out=0.1)
    assert isinstance(task, Task)
    rows_seen = []
    for batch in Batches(task.train, TokenBudget(499), seed=2):
        assert batch.n_padded <= 499
        rows = zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True)
        rows_seen += [task.tokenizer.decode(row[:n]) for row, n in rows]
    assert sorted(rows_seen) == sorted(task.train.sources)


def test_divide_depends_on_the_source_sentence_only(tmp_path):
    rows = [(f"sentence {i // 3}", f"frase {i}") for i in range(603)]
    path = _write(tmp_path / "p.tsv", rows)
    train, held = divide(read_pairs(path), 0.2)
    assert not set(train.sources) & set(held.sources)
    assert len(train) + len(held) == 603
    assert 60 < len(held) < 180
    backwards = divide(read_pairs(_write(tmp_path / "q.tsv", rows[::-1])), 0.2)[1]
    assert set(backwards.sources) == set(held.sources)
    with pytest.raises(ConfigError, match=r"hold_out is 1\.0; expected a number above 0 and below 1"):
        divide(read_pairs(path), 1.0)
    with pytest.raises(DataError, match="leaves one part empty; give a validation file"):
        divide(read_pairs(_write(tmp_path / "one.tsv", rows[:3])), 0.5)


def test_load_folder_and_separate_validation_file(tmp_path, tokenizer):
    (tmp_path / "train.tsv.xz").write_bytes(lzma.compress(_write(tmp_path / "t", GOOD[:2]).read_bytes()))
    _write(tmp_path / "dev.tsv", GOOD[2:])
    task = TranslationTask.load(tmp_path, tokenizer=tokenizer)
    assert task.train.sources == ["Go.", "Hello world!"]
    assert task.validation.sources == ["I ran a long way."]
    assert task.tokenizer is tokenizer
    other = _write(tmp_path / "other.tsv", GOOD[:1])
    assert TranslationTask.load(tmp_path, validation=other, tokenizer=tokenizer).validation.sources == ["Go."]
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=r"has no file of pairs: expected one of train\.tsv"):
        TranslationTask.load(tmp_path / "empty")


def test_pair_split_to_device_makes_batches_there(tmp_path, tokenizer):
    split = PairSplit(read_pairs(_write(tmp_path / "p.tsv", GOOD)), tokenizer, max_tokens=97)
    on_device = split.to("meta")
    batch = on_device.batch(torch.tensor([0, 2]))
    assert batch.device.type == batch.source.device.type == batch.weights.device.type == "meta"
    assert batch.labels.shape == split.batch(torch.tensor([0, 2])).labels.shape
    assert split.batch(torch.tensor([0])).device.type == "cpu"
