"""Training benchmarks at smoke sizes: both sides train, and rows name what was measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import engine_training
from benchmarks.engine import Setting


def test_train_gpt2_yields_three_rows_and_trains_the_baseline():
    # Any trainable module can replace the transformers baseline here.
    baseline = nn.Linear(3, 3)
    before = baseline.weight.detach().clone()

    def make_baseline(*_):
        return baseline, lambda: baseline(torch.ones(2, 3)).square().sum()

    rows = list(engine_training.train_gpt2(Setting("cpu", smoke=True), make_baseline))
    assert [(row.unit, row.target) for row in rows] == [
        ("tokens/s", 1.2),
        ("tokens/s", 1.0),
        ("GiB", pytest.approx(1 / 0.65)),
    ]
    assert all(row.value > 0 and row.speedup > 0 for row in rows)
    assert not torch.equal(before, baseline.weight)


def test_train_base_measures_sentence_pairs_and_needs_data(tmp_path):
    pairs = [f"the {a} sees {b} of them\tel {a} ve {b} de ellos" for a in ("cat", "dog", "owl") for b in range(40)]
    (tmp_path / "train.tsv").write_text("\n".join(pairs[:-20]))
    (tmp_path / "dev.tsv").write_text("\n".join(pairs[-20:]))
    (row,) = engine_training.train_base(Setting("cpu", data=tmp_path, smoke=True))
    assert row.unit == "target tokens/s"
    assert "padding" in row.baseline
    assert row.value > 0 < row.baseline_value
    assert list(engine_training.train_base(Setting("cpu", smoke=True))) == []


def test_train_sparse_trains_a_llama_under_a_mask():
    pytest.importorskip("transformers")
    (row,) = engine_training.train_sparse(Setting("cpu", smoke=True))
    assert row.target == 4.0
    assert row.value > 0 < row.baseline_value


def test_train_losses_of_compiled_and_eager_differ_less_than_seeds():
    (row,) = engine_training.train_losses(Setting("cpu", smoke=True))
    assert row.unit == "nats"
    assert row.meets_target
