"""The commands of the README at small sizes: train a BPE text model, generate, and write an attention page."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from clearhead.training import read_log

BOOK = "".join(
    f"The {kind} went to the {place} in the morning.\nIn the evening the {kind} came back.\n"
    for kind in ("cat", "dog", "owl", "fox")
    for place in ("river", "market", "hill", "garden", "sea")
)
SMALL = [
    "steps=60",
    "context=16",
    "model.max_len=32",
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
    trained = cli("train", "text", "--data", book, "--set", "data.vocab_size=300", *settings, "--out", run)
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


def interrupt(folder):
    """Leave a run as a kill after its last checkpoint would have left it."""
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()


def test_generate_from_an_unfinished_run_uses_its_newest_checkpoint(cli, book, tmp_path):
    run = tmp_path / "run"
    settings = [part for item in [*SMALL, "checkpoint_every=25"] for part in ("--set", item)]
    assert cli("train", "text", "--data", book, *settings, "--out", run, "--json").code == 0
    options = ("--model", run, "--max-new-tokens", 9, "--json")
    finished = cli("generate", "The cat", *options).json
    interrupt(run)
    ran = cli("generate", "The cat", *options)
    assert ran.json == finished  # the newest checkpoint is that of the last step
    assert ran.err == f"clearhead: {run} is not finished; its checkpoint of step 60 is used\n"
    for checkpoint in run.glob("step-*"):
        shutil.rmtree(checkpoint)
    ran = cli("generate", "The cat", *options)
    assert ran.code == 1
    assert f"continue with: clearhead train --resume {run}" in ran.err


def test_evaluate_a_run_uses_the_data_of_the_run(cli, book, tmp_path):
    run = tmp_path / "run"
    settings = [part for item in SMALL for part in ("--set", item)]
    trained = cli("train", "text", "--data", book, *settings, "--out", run, "--json").json
    evaluated = cli("evaluate", run, "--json").json
    assert evaluated["loss"] == pytest.approx(trained["valid_loss"], rel=1e-4)
    assert cli("evaluate", run / "model", "--json").json["loss"] == evaluated["loss"]
    shutil.rmtree(run / "model")
    assert cli("evaluate", run, "--json").json["loss"] == evaluated["loss"]
    book.unlink()
    assert "book.txt" in cli("evaluate", run).err


def test_train_resume_with_more_steps_extends_the_run(cli, book, tmp_path):
    run = tmp_path / "run"
    settings = [part for item in SMALL for part in ("--set", item)]
    assert cli("train", "text", "--data", book, *settings, "--out", run).code == 0
    extended = cli("train", "--resume", run, "--set", "steps=75", "--json").json
    assert (extended["steps"], extended["total_steps"], extended["ending"]) == (75, 75, "finished")
    assert "steps = 75" in (run / "train.toml").read_text()
    assert "steps = 75" in (run / "model/train.toml").read_text()
    assert cli("train", "--resume", run, "--json").json["steps"] == 75
    shorter = cli("train", "--resume", run, "--set", "steps=70")
    assert shorter.code == 1
    assert shorter.err.endswith(f"steps=70 is 70 steps, but {run} has made 75; set 76 or more\n")
    assert "steps = 75" in (run / "train.toml").read_text()


def test_generate_samples_by_default_from_a_model_that_clearhead_trained(cli):
    options = ("--max-new-tokens", 20, "--json")
    sampled = cli("generate", "ROMEO:", *options).json
    assert sampled == cli("generate", "ROMEO:", "--temperature", 0.8, *options).json
    assert sampled != cli("generate", "ROMEO:", "--greedy", *options).json
    assert sampled != cli("generate", "ROMEO:", "--seed", 1, *options).json
    both = cli("generate", "ROMEO:", "--greedy", "--top-k", 3)
    assert both.code == 1
    assert "--greedy excludes sampling; remove it or --top-k" in both.err


def test_train_notes_a_smaller_vocabulary_and_few_validation_examples(cli, book, tmp_path):
    settings = [part for item in [*SMALL, "data.vocab_size=900", "hold_out=0.01"] for part in ("--set", item)]
    trained = cli("train", "text", "--data", book, *settings, "--out", tmp_path / "run", "--json")
    assert trained.code == 0, trained.err
    vocabulary, validation = trained.json["notes"]
    assert re.fullmatch(r"the vocabulary has \d+ tokens instead of 900: .* no more pairs to merge", vocabulary)
    assert re.fullmatch(r".* has \d+ examples?; data.hold_out sets the held-out share", validation)


def test_train_prints_samples_without_changing_the_run(cli, book, tmp_path):
    settings = [part for item in [*SMALL, "eval_every=20"] for part in ("--set", item)]
    sampled = cli("train", "text", "--data", book, *settings, "--out", tmp_path / "a", "--sample", "The cat")
    assert sampled.code == 0, sampled.err
    assert [step for step in (20, 40, 60) if f"step {step}: The cat" in sampled.err] == [20, 40, 60]
    assert cli("train", "text", "--data", book, *settings, "--out", tmp_path / "b").code == 0
    first, second = (
        [{key: row[key] for key in ("step", "loss")} for row in read_log(tmp_path / name)] for name in ("a", "b")
    )
    assert first == second
    rejected = cli("train", "sort-dedup", "--sample", "A", "--out", tmp_path / "c")
    assert rejected.code == 1
    assert "--sample prints text, so it needs the task text" in rejected.err
    assert not (tmp_path / "c").exists()
