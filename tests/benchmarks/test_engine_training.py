"""The training rows at trial sizes: both sides learn, and a row says what was measured. No clock is asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import engine_training
from benchmarks.engine import Setting


def test_gpt2_has_its_three_rows(monkeypatch):
    # The peer of the real row is transformers'; here any module that learns stands for it.
    peer = nn.Linear(3, 3)
    before = peer.weight.detach().clone()
    monkeypatch.setattr(
        engine_training, "_transformers_gpt2", lambda *told: (peer, lambda: peer(torch.ones(2, 3)).square().sum())
    )
    rows = list(engine_training.train_gpt2(Setting("cpu", trial=True)))
    assert [(row.unit, row.wanted) for row in rows] == [
        ("tokens/s", 1.2),
        ("tokens/s", 1.0),
        ("GiB", pytest.approx(1 / 0.65)),
    ]
    assert all(row.ours > 0 and row.ratio > 0 for row in rows)
    assert not torch.equal(before, peer.weight)


def test_the_base_model_is_measured_on_sentence_pairs(tmp_path):
    pairs = [f"the {a} sees {b} of them\tel {a} ve {b} de ellos" for a in ("cat", "dog", "owl") for b in range(40)]
    (tmp_path / "train.tsv").write_text("\n".join(pairs[:-20]))
    (tmp_path / "dev.tsv").write_text("\n".join(pairs[-20:]))
    (row,) = engine_training.train_base(Setting("cpu", data=tmp_path, trial=True))
    assert row.unit == "target tokens/s"
    assert "padding" in row.peer
    assert row.ours > 0 < row.peer_value
    assert list(engine_training.train_base(Setting("cpu", trial=True))) == []


def test_a_llama_trains_under_a_mask():
    pytest.importorskip("transformers")
    (row,) = engine_training.train_under(Setting("cpu", trial=True))
    assert row.wanted == 4.0
    assert row.ours > 0 < row.peer_value


def test_both_ways_learn_the_same():
    (row,) = engine_training.train_curve(Setting("cpu", trial=True))
    assert row.unit == "nats"
    assert row.holds  # one seed, two ways of one sum: far closer than two seeds
