"""`bench auto` says what auto chose, and what that loses."""

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
    chosen="sdpa",
)


def test_a_choice_loses_against_the_faster_way():
    assert ROW.lost == pytest.approx(1.5)
    assert replace(ROW, chosen="sparse").lost == 1.0
    assert auto.line(ROW).endswith("loses")
    assert not auto.line(replace(ROW, sdpa=2.09)).endswith("loses")
    assert auto.summary([ROW, replace(ROW, sdpa=2.09)]) == "1 of 2 choices lose more than 5%"


def test_every_mask_both_ways_at_every_length(monkeypatch, tmp_path):
    monkeypatch.setattr(auto, "CATALOGUE", CATALOGUE[1:4])
    out = tmp_path / "auto.json"
    rows = auto.measure(TINY, out)
    assert [(r.name, r.length, r.backward) for r in rows] == [
        (p.name, T, backward) for T in (37, 23) for p in CATALOGUE[1:4] for backward in (False, True)
    ]
    assert {r.chosen for r in rows} == {"sdpa"}  # so short that no plan is made
    assert all(r.sdpa > 0 and r.sparse > 0 and r.heads == 2 for r in rows)
    assert json.loads(out.read_text())["rows"] == [row.to_dict() for row in rows]


def test_the_choice_is_the_one_that_attend_makes(monkeypatch):
    monkeypatch.setattr(auto, "CATALOGUE", [p for p in CATALOGUE if p.name in ("narrow window", "causal")])
    rows = auto.measure(replace(TINY, lengths=(1024,), widths=(64,)))
    assert {(r.name, r.chosen) for r in rows} == {("narrow window", "sparse"), ("causal", "sdpa")}


def test_no_time_measures_nothing():
    assert auto.measure(replace(TINY, seconds=-1.0)) == []


@pytest.mark.parametrize(
    ("file", "kind", "choices"),
    [
        ("auto.json", (64, "bfloat16"), 212),
        ("auto-128.json", (128, "bfloat16"), 216),
        ("auto-float32.json", (64, "float32"), 204),
    ],
)
def test_todays_constants_choose_right_for_what_was_measured_on_a_gpu(file, kind, choices):
    """Every choice of the committed files, made again: what gathering and the fused kernel took says what it loses."""
    rows = auto.read_rows(RESULTS / file)
    assert {(row.width, row.dtype) for row in rows} == {kind}
    assert len({(row.name, row.length, row.backward) for row in rows}) == choices
    assert [line for row in rows if (line := auto.line(auto.again(row))).endswith("loses")] == []


def test_a_fit_is_made_of_both_ways_of_every_choice(tmp_path):
    rows = [
        asdict(replace(ROW, name=name, length=1024, heads=32, width=64, dtype="bfloat16"))
        for name in ("window", "BigBird")
    ]
    (tmp_path / "auto.json").write_text(json.dumps({"rows": rows}))
    ours, theirs, *_ = samples = list(from_auto(tmp_path / "auto.json"))
    assert [(s.ms, s.training) for s in samples] == [(2.0, False), (3.0, False)] * 2
    assert ours.full + ours.partial > 0 == ours.masked
    assert theirs.masked == 32 * 1024**2
    assert [(s.leaves, s.scattered) for s in samples[1::2]] == [(1, 0), (4, 1)]
