"""`python -m benchmarks tracing`: a small run of it, and what its figures say."""

from __future__ import annotations

import dataclasses
import json

import torch

from benchmarks.tracing import Options, measure

SMALL = Options(length=307, layers=2, width=24, heads=3, device="cpu", dtype=torch.float32, rows=7, repeats=2)


def test_rows_are_written_and_their_numbers_agree(tmp_path):
    rows = measure(SMALL, tmp_path / "look.json")
    written = json.loads((tmp_path / "look.json").read_text())
    assert written["rows"] == [row.to_dict() for row in rows]
    assert {"machine", "versions"} <= set(written)
    assert [row.mask for row in rows] == ["causal()", "causal() & (window(256, 0) | every(64))"]
    for row in rows:
        assert 0 < row.difference <= row.tolerance < 1e-4
        assert row.square_bytes == 4 * 307**2
        assert row.kept_bytes == 4 * 307 * 24 * 4  # q, k, v and the output, in float32
        assert row.head_ms > 0 < row.rows_ms


def test_a_row_holds_only_within_its_bounds():
    row = measure(dataclasses.replace(SMALL, repeats=1))[0]
    good = dataclasses.replace(row, ratio=1.05)
    assert good.holds
    assert not dataclasses.replace(good, ratio=1.11).holds
    assert not dataclasses.replace(good, rows_peak_bytes=good.square_bytes).holds
    assert not dataclasses.replace(good, difference=2 * good.tolerance).holds


def test_command_with_json_prints_the_results_file(benchmarks_cli, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.tracing.options_for", lambda device: SMALL)
    result = benchmarks_cli("tracing", "--out", tmp_path / "tracing.json", "--json")
    assert result.code == 0
    assert result.json == json.loads((tmp_path / "tracing.json").read_text())
