"""Shards contain the ids of the texts, independent of processes and interruptions; corruption is detected."""

from __future__ import annotations

import gzip
import json
from functools import partial

import numpy as np
import pytest
import torch

from clearhead.data import Batches, CharTokenizer, FixedSize, LanguageModeling, RandomWindows, Shards, train_bpe
from clearhead.data import shards as room
from clearhead.errors import ConfigError, DataError, StorageError
from clearhead.masks import documents
from clearhead.models import DecoderConfig
from clearhead.nn.positions import NoPE

BOOK = "".join(f"line {i} of a short book,\n\tsaid twice: línea {i * 7} — 第{i}行\n" for i in range(157))
tokenize = partial(room.tokenize, processes=1)  # any other would have to import everything first


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([BOOK], 401)


def ids_of(shards):
    return shards.read(0, len(shards)).tolist()


@pytest.mark.parametrize("at_once", [300, 1009, 1 << 20])
def test_tokenize_ids_do_not_depend_on_the_shard_size(tmp_path, bpe, at_once):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + BOOK.replace("\n", "\r\n").encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"another one"))
    shards = tokenize([tmp_path / "a.txt", tmp_path / "b.txt.gz"], bpe, tmp_path / "out", bytes_per_shard=at_once)
    assert ids_of(shards) == [*bpe.encode(BOOK), bpe.eos_id, *bpe.encode("another one"), bpe.eos_id]
    assert shards.n_documents == 2
    assert shards.dtype == "uint16"
    assert len(shards.names) > 5 or at_once > 1009
    assert shards.tokenizer.to_json() == bpe.to_json()
    for start, stop in ((0, 0), (3, 4), (17, 401), (len(shards) - 2, len(shards) + 99)):
        assert shards.read(start, stop).tolist() == ids_of(shards)[start:stop]


def test_tokenize_files_do_not_depend_on_the_number_of_processes(tmp_path, bpe):
    (tmp_path / "a.txt").write_text(BOOK)
    for n in (1, 2):
        tokenize([tmp_path / "a.txt"], bpe, tmp_path / str(n), processes=n, bytes_per_shard=3001)
    serial, parallel = (sorted((tmp_path / str(n)).iterdir()) for n in (1, 2))
    assert [path.name for path in serial] == [path.name for path in parallel]
    assert [path.read_bytes() for path in serial] == [path.read_bytes() for path in parallel]


@pytest.mark.parametrize("at_once", [23, 71, 1 << 20])
def test_tokenize_separators_and_json_lines_divide_documents(tmp_path, bpe, at_once):
    texts = ["one\ntwo\n", "three words here\n", "four\n"]
    (tmp_path / "a.txt").write_text("<doc>\n" + "<doc>\n".join(texts) + "<doc>\n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts) + 'no json\n{"n": 1}\n')
    expected = [number for text in texts for number in (*bpe.encode(text), bpe.eos_id)]
    by_line = tokenize([tmp_path / "a.txt"], bpe, tmp_path / "1", separator="<doc>", bytes_per_shard=at_once)
    by_json = tokenize([tmp_path / "b.jsonl"], bpe, tmp_path / "2", bytes_per_shard=at_once)
    assert ids_of(by_line) == ids_of(by_json) == expected
    assert by_line.n_documents == by_json.n_documents == 3
    assert json.loads((tmp_path / "2/index.json").read_text())["skipped_lines"] == 2


def test_tokenize_interrupted_resumes_and_rewrites_only_changed_shards(tmp_path, bpe, monkeypatch):
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text(BOOK)
    uninterrupted = ids_of(tokenize([source], bpe, tmp_path / "whole", bytes_per_shard=1009))
    encoded_texts = []
    encode_long = bpe.encode_long

    def interrupted(text):
        if len(encoded_texts) == 4:
            raise KeyboardInterrupt
        return recorded(text)

    def recorded(text):
        encoded_texts.append(text)
        return encode_long(text)

    monkeypatch.setattr(bpe, "encode_long", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenize([source], bpe, out, bytes_per_shard=1009)
    with pytest.raises(StorageError, match=r"there is no .*index\.json"):
        Shards.open(out)
    monkeypatch.setattr(bpe, "encode_long", recorded)
    assert ids_of(tokenize([source], bpe, out, bytes_per_shard=1009)) == uninterrupted
    assert "".join(encoded_texts) == BOOK  # each part was encoded once
    n = len(encoded_texts)
    assert n > 5
    tokenize([source], bpe, out, bytes_per_shard=1009)
    assert len(encoded_texts) == n
    source.write_text(BOOK + "and more\n")
    longer = ids_of(tokenize([source], bpe, out, bytes_per_shard=1009))
    assert longer == [*bpe.encode(BOOK + "and more\n"), bpe.eos_id]
    assert encoded_texts[n:] == [encoded_texts[n - 1] + "and more\n"]


def test_tokenize_large_vocabulary_uses_four_bytes(tmp_path):
    alphabet = CharTokenizer([chr(i) for i in range(0x20, 0x7F)] + [chr(0x20000 + i) for i in range(1 << 16)])
    (tmp_path / "a.txt").write_text("abc" + chr(0x20000 + 65_000))
    shards = tokenize([tmp_path / "a.txt"], alphabet, tmp_path / "out")
    assert shards.dtype == "uint32"
    assert ids_of(shards) == [*alphabet.encode("abc" + chr(0x20000 + 65_000)), alphabet.eos_id]


def test_tokenize_and_open_invalid_folder_raises(tmp_path, bpe):
    (tmp_path / "a.txt").write_text(BOOK)
    out = tmp_path / "out"
    tokenize([tmp_path / "a.txt"], bpe, out)
    with pytest.raises(StorageError, match="shards of another tokenizer"):
        tokenize([tmp_path / "a.txt"], train_bpe([BOOK], 300), out)
    raw = bytearray((out / "00000.ids").read_bytes())
    raw[5] ^= 1
    (out / "00000.ids").write_bytes(raw)
    with pytest.raises(StorageError, match=r"00000\.ids was modified"):
        Shards.open(out)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="the files contain no text"):
        tokenize([tmp_path / "empty.txt"], bpe, tmp_path / "e")
    with pytest.raises(StorageError, match=r"contains [a-z.]+, which is not part"):
        tokenize([tmp_path / "a.txt"], bpe, tmp_path)
    with pytest.raises(ConfigError, match="expected the text of a line"):
        tokenize([tmp_path / "a.txt"], bpe, tmp_path / "x", separator=" ")
    with pytest.raises(DataError, match="no file to tokenize"):
        tokenize([], bpe, tmp_path / "x")


# ---------------------------------------------------------------------- windows over shards


@pytest.fixture
def shards(tmp_path, bpe):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(BOOK[i * 700 : i * 700 + 555])
    return tokenize([tmp_path / f"{i}.txt" for i in range(3)], bpe, tmp_path / "out", bytes_per_shard=200)


def test_tokenize_skips_json_lines_whose_text_cannot_be_encoded(tmp_path, bpe):
    lines = ['{"text": "one"}', r'{"text": "half \ud800 a pair"}', "[" * 100_000, '{"text": 3}', '{"text": "two"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    shards = tokenize([tmp_path / "a.jsonl"], bpe, tmp_path / "out")
    assert ids_of(shards) == [*bpe.encode("one"), bpe.eos_id, *bpe.encode("two"), bpe.eos_id]
    assert json.loads((tmp_path / "out" / "index.json").read_text())["skipped_lines"] == 3


@pytest.mark.bad_input
def test_tokenize_into_a_damaged_folder_writes_it_again(tmp_path, bpe):
    (tmp_path / "a.txt").write_text(BOOK)
    folder = tmp_path / "a" / "out"
    expected = ids_of(tokenize([tmp_path / "a.txt"], bpe, folder))
    index = json.loads((folder / "index.json").read_text())
    outside = {**index["shards"][0], "file": "../outside.ids"}
    for records in (5, [3], [{}], [outside], [{"file": "notes.txt"}]):
        (folder / "index.json").write_text(json.dumps({**index, "shards": records}))
        assert ids_of(tokenize([tmp_path / "a.txt"], bpe, folder)) == expected
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]


@pytest.mark.bad_input
def test_tokenize_invalid_numbers_and_folders_raise(tmp_path, bpe):
    source = tmp_path / "a.txt"
    source.write_text(BOOK)
    for options in ({"processes": 0}, {"processes": -1}, {"bytes_per_shard": 0}):
        with pytest.raises(ConfigError, match="expected a whole number of at least 1"):
            tokenize([source], bpe, tmp_path / "out", **options)
    with pytest.raises(StorageError, match=r"cannot write shards to .*: File exists; choose another folder"):
        tokenize([source], bpe, source)


def test_shard_split_equals_window_split(shards):
    task = LanguageModeling.load(
        shards.folder, context=31, windows=RandomWindows(), seed=5, hold_out=0.2, across_documents=True
    )
    cut = int(len(shards) * 0.8)
    ids = torch.from_numpy(shards.read(0, len(shards)))
    for split, part in ((task.train, ids[:cut]), (task.validation, ids[cut:])):
        from clearhead.data import WindowSplit

        same = WindowSplit(part, context=31, windows=split.windows, seed=5, pad_id=shards.tokenizer.pad_id)
        shard_batch, memory_batch = (s.batch(torch.arange(len(s)), epoch=2, multiple=8) for s in (split, same))
        for name in ("ids", "labels", "weights", "lengths"):
            assert torch.equal(getattr(shard_batch, name), getattr(memory_batch, name)), name
        assert (shard_batch.n_tokens, shard_batch.n_labels) == (memory_batch.n_tokens, memory_batch.n_labels)


def test_shard_split_documents_are_independent(shards):
    task = LanguageModeling.load(shards.folder, context=37)
    batch = task.train.batch(torch.arange(len(task.train)))
    eos = shards.tokenizer.eos_id
    assert (batch.documents.max(1).values > 0).any()
    for ids, numbers, weights in zip(batch.ids.tolist(), batch.documents.tolist(), batch.weights.tolist(), strict=True):
        number = 0
        for token, got, weight in zip(ids, numbers, weights, strict=True):
            assert got == number
            assert weight == (token != eos)
            number += token == eos
    config = DecoderConfig(vocab_size=401, max_len=64, d_model=12, n_heads=3, n_layers=2, positions=NoPE())
    model = config.build().eval()
    row = int((batch.documents.max(1).values > 0).nonzero()[0])
    together = batch.logits(model)[row]
    for number in range(int(batch.documents[row].max()) + 1):
        mine = batch.documents[row] == number
        assert torch.allclose(model(batch.ids[row : row + 1, mine])[0], together[mine], atol=1e-5)
    assert torch.allclose(model(batch.ids, mask=documents(batch.documents)), batch.logits(model))


def test_shard_batches_do_not_depend_on_processes_and_can_be_resumed(shards):
    def walk(world, skip=0):
        parts = [
            Batches(LanguageModeling.load(shards.folder, context=13).train, FixedSize(6), seed=3, rank=r, world=world)
            for r in range(world)
        ]
        for part in parts:
            part.load_state_dict({**part.state_dict(), "position": skip})
        return [[batch.ids[batch.weights.sum(1) > 0] for batch in part] for part in parts]

    (alone,) = walk(1)
    both = walk(2)
    for expected, first, second in zip(alone, *both, strict=True):
        assert sorted(expected.tolist()) == sorted(first.tolist() + second.tolist())
    (later,) = walk(1, skip=4)
    assert all(torch.equal(a, b) for a, b in zip(alone[4:], later, strict=True))
    assert np.unique(np.concatenate([ids.numpy() for ids in alone]), axis=0).shape[0] == sum(map(len, alone))
