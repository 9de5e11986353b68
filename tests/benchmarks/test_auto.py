"""`python -m benchmarks auto`: the choice of impl="auto" and its slowdown."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import auto
from benchmarks.sparse import Options
from clearhead.masks.catalogue import CATALOGUE
from tools.calibrate import from_auto

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TINY = Options(lengths=(37, 23), widths=(8,), batch=1, heads=2, device="cpu", dtype=torch.float32, seconds=1e6)
ROW = auto.Choice(
    name="a",
    length=37,
    heads=2,
    width=8,
    dtype="float32",
    backward=False,
    sdpa=3.0,
    sparse=2.0,
    choice="sdpa",
)


def test_choice_slowdown_is_relative_to_the_faster_implementation():
    assert ROW.slowdown == pytest.approx(1.5)
    assert replace(ROW, choice="sparse").slowdown == 1.0
    assert auto.line(ROW).endswith("TOO SLOW")
    assert not auto.line(replace(ROW, sdpa=2.09)).endswith("TOO SLOW")
    assert auto.summary([ROW, replace(ROW, sdpa=2.09)]) == "1 of 2 choices are slower than the best by more than 5%"


def test_measure_returns_all_masks_lengths_and_passes(monkeypatch, tmp_path):
    monkeypatch.setattr(auto, "CATALOGUE", CATALOGUE[1:4])
    out = tmp_path / "auto.json"
    rows = auto.measure(TINY, out)
    assert [(r.name, r.length, r.backward) for r in rows] == [
        (p.name, T, backward) for T in (37, 23) for p in CATALOGUE[1:4] for backward in (False, True)
    ]
    assert {r.choice for r in rows} == {"sdpa"}  # too short for a plan
    assert all(r.sdpa > 0 and r.sparse > 0 and r.heads == 2 for r in rows)
    assert json.loads(out.read_text())["rows"] == [row.to_dict() for row in rows]


def test_measure_records_the_choice_of_attend(monkeypatch):
    monkeypatch.setattr(auto, "CATALOGUE", [p for p in CATALOGUE if p.name in ("narrow window", "causal")])
    rows = auto.measure(replace(TINY, lengths=(1024,), widths=(64,)))
    assert {(r.name, r.choice) for r in rows} == {("narrow window", "sparse"), ("causal", "sdpa")}


def test_measure_without_time_returns_no_rows():
    assert auto.measure(replace(TINY, seconds=-1.0)) == []


@pytest.mark.parametrize(
    ("file", "kind", "choices"),
    [
        ("auto.json", (64, "bfloat16"), 212),
        ("auto-128.json", (128, "bfloat16"), 216),
        ("auto-float32.json", (64, "float32"), 204),
    ],
)
def test_cost_model_meets_target_on_committed_gpu_results(file, kind, choices):
    """Choose again for every committed row, with its measured times of both implementations."""
    rows = auto.read_rows(RESULTS / file)
    assert {(row.width, row.dtype) for row in rows} == {kind}
    assert len({(row.name, row.length, row.backward) for row in rows}) == choices
    assert [line for row in rows if (line := auto.line(auto.choose_again(row))).endswith("TOO SLOW")] == []


def test_from_auto_yields_samples_of_both_implementations(tmp_path):
    rows = [
        asdict(replace(ROW, name=name, length=1024, heads=32, width=64, dtype="bfloat16"))
        for name in ("window", "BigBird")
    ]
    (tmp_path / "auto.json").write_text(json.dumps({"rows": rows}))
    sparse, sdpa, *_ = samples = list(from_auto(tmp_path / "auto.json"))
    assert [(s.ms, s.training) for s in samples] == [(2.0, False), (3.0, False)] * 2
    assert sparse.work.full + sparse.work.partial > 0 == sparse.work.masked
    assert sdpa.work.masked == 32 * 1024**2
    assert [(s.work.leaves, s.work.scattered) for s in samples[1::2]] == [(1, 0), (4, 1)]
