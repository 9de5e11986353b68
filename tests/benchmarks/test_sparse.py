"""`python -m benchmarks sparse`: order of the measurements, resuming from a file, and compilation in advance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import sparse
from benchmarks.results import machine
from benchmarks.sparse import Options, SparseRow, measure, read_rows, stages
from benchmarks.sparse_flex import compile_ahead, predicate_of
from clearhead.errors import StorageError
from clearhead.masks.catalogue import CATALOGUE

TINY = Options(lengths=(37, 23), widths=(8,), batch=1, heads=2, device="cpu", dtype=torch.float32, seconds=1e6)


@pytest.fixture
def small_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "CATALOGUE", CATALOGUE[1:4])


def test_stages_start_with_targets_and_measure_flex_after_sparse():
    first, first_flex, other, other_flex = stages(Options())
    assert {(s.length, s.width) for s in first} == {(16384, 64)}
    assert [s.pattern for s in first] == list(CATALOGUE)
    assert other[0].length == 131072
    assert len({s.key for s in first + other}) == 8 * len(CATALOGUE)
    for without_flex, flex in ((first, first_flex), (other, other_flex)):
        assert not any(s.flex for s in without_flex)
        assert all(s.flex for s in flex)
        assert [s.key for s in without_flex] == [s.key for s in flex]
    assert not any(s.flex for stage in stages(TINY) for s in stage)


@pytest.mark.parametrize("pattern", CATALOGUE, ids=lambda pattern: pattern.name)
def test_predicate_of_mask_equals_dense_mask(pattern):
    T = 211
    test = predicate_of(pattern.mask(T), T, torch.device("cpu"))
    row_predicate = torch.vmap(test, in_dims=(None, 0))
    p, j = torch.arange(T), torch.arange(T)
    assert torch.equal(torch.vmap(row_predicate, in_dims=(0, None))(p, j), pattern.mask(T).dense(T))


def test_measure_resumes_from_earlier_rows(small_catalogue: None, tmp_path: Path):
    out = tmp_path / "sparse.json"
    measured: list[tuple[str, int]] = []
    complete = measure(TINY, out, on_row=lambda row: measured.append((row.name, row.length)))
    assert measured == [(p.name, T) for T in TINY.lengths for p in CATALOGUE[1:4]]
    assert read_rows(out) == complete
    # One row is missing and one is incomplete: these two are measured, the others are unchanged.
    earlier = [row for row in complete if (row.name, row.length) != measured[1]]
    earlier[-1] = replace(earlier[-1], sparse_both=None)
    measured_now: list[tuple[str, int]] = []
    resumed = measure(TINY, out, on_row=lambda row: measured_now.append((row.name, row.length)), earlier=earlier)
    assert measured_now == [measured[1], measured[-1]]
    assert sorted((r.name, r.length) for r in resumed) == sorted(measured)
    rows = {(r.name, r.length): r for r in resumed}
    assert all(rows[r.name, r.length] is r for r in earlier[:-1])
    assert {r["name"] for r in json.loads(out.read_text())["rows"]} == {p.name for p in CATALOGUE[1:4]}


def test_measure_without_time_returns_earlier_rows(small_catalogue: None):
    row = SparseRow(CATALOGUE[1].name, "", 37, 8, 1, 2)
    assert measure(replace(TINY, seconds=-1.0), earlier=[row]) == [row]


def test_has_row_with_failed_flex_is_complete():
    done = SparseRow("a", "", 37, 8, 1, 2, sparse=1.0, sparse_both=2.0)
    assert sparse.has_result(done, flex=False)
    assert not sparse.has_result(done, flex=True)
    assert sparse.has_result(replace(done, flex=1.0, flex_both=1.0), flex=True)
    assert sparse.has_result(replace(done, notes=" flex: InductorError"), flex=True)
    assert not sparse.has_result(None, flex=False)


@pytest.mark.bad_input
def test_read_rows_of_another_machine_raises_storage_error(tmp_path: Path):
    path = tmp_path / "sparse.json"
    path.write_text(json.dumps({"machine": {**machine(), "gpu": "NVIDIA X1"}, "rows": []}))
    with pytest.raises(StorageError, match="was measured on NVIDIA X1"):
        read_rows(path)
    path.write_text("[]")
    with pytest.raises(StorageError, match="cannot be read as results"):
        read_rows(path)


def test_compile_ahead_runs_all_jobs_although_one_fails():
    jobs = [s for s in stages(TINY)[1] if s.pattern.name in ("window", "narrow window")]
    wrong = replace(jobs[0], pattern=replace(jobs[0].pattern, name="no such pattern"))
    done = compile_ahead(replace(TINY, workers=1), [wrong, *jobs], 100.0)
    assert done == {s.key for s in jobs}
    assert compile_ahead(TINY, jobs, 0.0) == set()
