"""`bench sparse` measures what matters first, goes on from an earlier file, and compiles ahead in processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import sparse
from benchmarks.results import machine
from benchmarks.sparse import Masked, Options, measure, read_rows, stages
from benchmarks.sparse_flex import compile_ahead, predicate_of
from clearhead.errors import StorageError
from clearhead.masks.catalogue import CATALOGUE

TINY = Options(lengths=(37, 23), widths=(8,), batch=1, heads=2, device="cpu", dtype=torch.float32, seconds=1e6)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "CATALOGUE", CATALOGUE[1:4])


def test_stages_put_the_targets_first_and_the_slow_compiler_after_ours():
    first, first_flex, rest, rest_flex = stages(Options())
    assert {(s.length, s.width) for s in first} == {(16384, 64)}
    assert [s.pattern for s in first] == list(CATALOGUE)
    assert rest[0].length == 131072
    assert len({s.key for s in first + rest}) == 8 * len(CATALOGUE)
    for ours, flex in ((first, first_flex), (rest, rest_flex)):
        assert not any(s.flex for s in ours)
        assert all(s.flex for s in flex)
        assert [s.key for s in ours] == [s.key for s in flex]
    assert not any(s.flex for stage in stages(TINY) for s in stage)


@pytest.mark.parametrize("pattern", CATALOGUE, ids=lambda pattern: pattern.name)
def test_what_flex_attention_is_given_is_the_mask(pattern):
    T = 211
    test = predicate_of(pattern.mask(T), T, torch.device("cpu"))
    of_a_row = torch.vmap(test, in_dims=(None, 0))
    p, j = torch.arange(T), torch.arange(T)
    assert torch.equal(torch.vmap(of_a_row, in_dims=(0, None))(p, j), pattern.mask(T).dense(T))


def test_a_run_goes_on_where_another_stopped(few: None, tmp_path: Path):
    out = tmp_path / "sparse.json"
    seen: list[tuple[str, int]] = []
    whole = measure(TINY, out, on_row=lambda row: seen.append((row.name, row.length)))
    assert seen == [(p.name, T) for T in TINY.lengths for p in CATALOGUE[1:4]]
    assert read_rows(out) == whole
    # One row is gone and one was not finished: those two are measured, the others kept as they are.
    kept = [row for row in whole if (row.name, row.length) != seen[1]]
    kept[-1] = replace(kept[-1], ours_both=None)
    seen_now: list[tuple[str, int]] = []
    again = measure(TINY, out, on_row=lambda row: seen_now.append((row.name, row.length)), kept=kept)
    assert seen_now == [seen[1], seen[-1]]
    assert sorted((r.name, r.length) for r in again) == sorted(seen)
    same = {(r.name, r.length): r for r in again}
    assert all(same[r.name, r.length] is r for r in kept[:-1])
    assert {r["name"] for r in json.loads(out.read_text())["rows"]} == {p.name for p in CATALOGUE[1:4]}


def test_no_time_measures_nothing_and_keeps_what_was_there(few: None):
    row = Masked(CATALOGUE[1].name, "", 37, 8, 1, 2)
    assert measure(replace(TINY, seconds=-1.0), kept=[row]) == [row]


def test_a_row_whose_flex_failed_is_not_tried_again():
    done = Masked("a", "", 37, 8, 1, 2, ours=1.0, ours_both=2.0)
    assert sparse._has(done, flex=False)
    assert not sparse._has(done, flex=True)
    assert sparse._has(replace(done, flex=1.0, flex_both=1.0), flex=True)
    assert sparse._has(replace(done, notes=" flex: InductorError"), flex=True)
    assert not sparse._has(None, flex=False)


@pytest.mark.bad_input
def test_another_machines_rows_are_refused(tmp_path: Path):
    path = tmp_path / "sparse.json"
    path.write_text(json.dumps({"machine": {**machine(), "gpu": "NVIDIA X1"}, "rows": []}))
    with pytest.raises(StorageError, match="was measured on NVIDIA X1"):
        read_rows(path)
    path.write_text("[]")
    with pytest.raises(StorageError, match="cannot be read as results"):
        read_rows(path)


def test_processes_run_every_step_once_and_survive_one_that_fails():
    steps = [s for s in stages(TINY)[1] if s.pattern.name in ("window", "narrow window")]
    wrong = replace(steps[0], pattern=replace(steps[0].pattern, name="no such pattern"))
    done = compile_ahead(replace(TINY, workers=1), [wrong, *steps], 100.0)
    assert done == {s.key for s in steps}
    assert compile_ahead(TINY, steps, 0.0) == set()
