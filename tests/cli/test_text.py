"""The commands of the README at small sizes: train a BPE text model, generate, and write an attention page."""

from __future__ import annotations

import json

import pytest

BOOK = "".join(
    f"The {kind} went to the {place} in the morning.\nIn the evening the {kind} came back.\n"
    for kind in ("cat", "dog", "owl", "fox")
    for place in ("river", "market", "hill", "garden", "sea")
)
SMALL = [
    "steps=60",
    "context=16",
    "max_len=32",
    "positions={type='LearnedPositions',max_len=32}",
    "d_model=32",
    "device=cpu",
]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(BOOK * 3)
    return path


def test_train_generate_and_inspect_a_text_model(cli, book, tmp_path):
    run, page = tmp_path / "runs/book", tmp_path / "page.html"
    settings = [part for item in SMALL for part in ("--set", item)]
    trained = cli("train", "text", "--data", book, "--set", "vocab_size=300", *settings, "--out", run)
    assert trained.code == 0, trained.err
    assert "waiting for data" in trained.out
    assert json.loads((run / "model/tokenizer.json").read_text())["model"]["type"] == "BPE"
    generated = cli("generate", "The cat went", "--model", run, "--max-new-tokens", 9)
    assert generated.code == 0, generated.err
    assert generated.out.strip()
    inspected = cli("inspect", run, "The cat went to the river", "--html", page)
    assert inspected.code == 0, inspected.err
    assert "<html" in page.read_text()


def test_train_tokenizer_and_tokenize_write_shards_for_training(cli, book, tmp_path):
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in BOOK.splitlines()))
    assert cli("train-tokenizer", book, "--out", tmp_path / "tok", "--vocab-size", 300).code == 0
    options = ("--tokenizer", tmp_path / "tok", "--out", tmp_path / "shards", "--processes", 1)
    tokenized = cli("data", "tokenize", book, tmp_path / "more.jsonl", *options, "--json")
    assert tokenized.code == 0, tokenized.err
    assert tokenized.json["documents"] == 1 + len(BOOK.splitlines())
    assert tokenized.json["dtype"] == "uint16"
    settings = [part for item in SMALL for part in ("--set", item)]
    trained = cli("train", "text", "--data", tmp_path / "shards", *settings, "--out", tmp_path / "run", "--json")
    assert trained.code == 0, trained.err
    assert 0 <= trained.json["data_wait"] < 1
    rejected = cli("train", "text", "--data", book, "--set", "model.vocab_size=8000", "--out", tmp_path / "no")
    assert rejected.code == 1
    assert "model.vocab_size=8000 has no effect" in rejected.err
    rejected = cli("data", "tokenize", book, "--tokenizer", tmp_path, "--out", tmp_path / "x")
    assert rejected.code == 1
    assert "tokenizer.json" in rejected.err


def test_data_lists_data_sets_and_rejects_unknown_names(cli):
    assert "shakespeare" in {item["name"] for item in cli("data", "--json").json}
    rejected = cli("data", "nobody-has-this")
    assert rejected.code == 1
    assert "nobody-has-this" in rejected.err
