"""`python -m benchmarks tracing`: rows of a small run, their consistency and their target."""

from __future__ import annotations

import dataclasses
import json

import torch

from benchmarks.tracing import Options, measure

SMALL = Options(length=307, layers=2, width=24, heads=3, device="cpu", dtype=torch.float32, rows=7, repeats=2)


def test_measure_writes_consistent_rows(tmp_path):
    rows = measure(SMALL, tmp_path / "tracing.json")
    written = json.loads((tmp_path / "tracing.json").read_text())
    assert written["rows"] == [row.to_dict() for row in rows]
    assert {"machine", "versions"} <= set(written)
    assert [row.mask for row in rows] == ["causal()", "causal() & (window(256, 0) | every(64))"]
    for row in rows:
        assert 0 < row.difference <= row.tolerance < 1e-4
        assert row.full_weights_bytes == 4 * 307**2
        assert row.trace_bytes == 4 * 307 * 24 * 4  # q, k, v and the output, in float32
        assert row.head_ms > 0 < row.rows_ms


def test_row_meets_target_only_within_all_bounds():
    row = measure(dataclasses.replace(SMALL, repeats=1))[0]
    good = dataclasses.replace(row, ratio=1.05)
    assert good.meets_target
    assert not dataclasses.replace(good, ratio=1.11).meets_target
    assert not dataclasses.replace(good, rows_peak_bytes=good.full_weights_bytes).meets_target
    assert not dataclasses.replace(good, difference=2 * good.tolerance).meets_target


def test_command_with_json_prints_the_results_file(benchmarks_cli, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.tracing.options_for", lambda device: SMALL)
    result = benchmarks_cli("tracing", "--out", tmp_path / "tracing.json", "--json")
    assert result.code == 0
    assert result.json == json.loads((tmp_path / "tracing.json").read_text())
