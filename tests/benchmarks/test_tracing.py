"""`python -m benchmarks tracing`: a small run of it, and what its figures say."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from benchmarks.tracing import Options, measure
from clearhead.cli import main

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


def test_the_command_speaks_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.tracing.options_for", lambda device: SMALL)
    monkeypatch.setattr(sys, "argv", ["clearhead", "bench", "look", "--out", str(tmp_path / "look.json"), "--json"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, None)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "look.json").read_text())
