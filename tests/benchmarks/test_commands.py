"""The command line of the benchmarks: files, devices and errors."""

from __future__ import annotations

import json

import pytest
import torch


def test_plot_sparse_with_results_draws_lengths_and_baseline(benchmarks_cli, tmp_path):
    row = {"length": 11, "width": 4, "density": 0.25, "fraction": 0.4, "fraction_both": 0.5}
    row |= {"flex": 3.0, "dense": 2.0}
    (tmp_path / "sparse.json").write_text(json.dumps({"rows": [row, row | {"length": 13}]}))
    out = tmp_path / "sparse.svg"
    assert benchmarks_cli("plot", "sparse", tmp_path / "sparse.json", "-o", out).code == 0
    svg = out.read_text()
    assert "11 tokens" in svg
    assert "13 tokens" in svg
    assert "FlexAttention" in svg


@pytest.mark.bad_input
@pytest.mark.parametrize("text", ["", "{}", '{"rows": []}', '{"rows": [3]}'])
def test_plot_sparse_without_results_fails_in_one_line(benchmarks_cli, tmp_path, text):
    (tmp_path / "sparse.json").write_text(text)
    result = benchmarks_cli("plot", "sparse", tmp_path / "sparse.json")
    assert result.code == 1
    assert "python -m benchmarks sparse --out" in result.err


@pytest.mark.parametrize("command", ["sparse", "auto", "tracing", "scaling"])
def test_unavailable_device_fails_in_one_line(benchmarks_cli, monkeypatch, tmp_path, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, message in (("tpu", "expected cpu or cuda"), ("cuda", "no GPU is available")):
        result = benchmarks_cli(command, "--device", device, "--out", tmp_path / "x.png")
        assert result.code == 1
        assert result.err.startswith("clearhead: device is ")
        assert message in result.err
        assert len(result.err.splitlines()) == 1


def test_sparse_with_lengths_and_widths_measures_exactly_these(benchmarks_cli, tmp_path):
    out = tmp_path / "sparse.json"
    sizes = ("--length", 23, "--length", 37, "--width", 8)
    result = benchmarks_cli("sparse", *sizes, "--device", "cpu", "--out", out)
    assert result.code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {(row["length"], row["width"]) for row in rows} == {(23, 8), (37, 8)}
    assert len(rows) == 2 * len({row["name"] for row in rows})
    assert str(out) in result.out


@pytest.mark.parametrize("command", [("scaling",), ("plot", "sparse")], ids=" ".join)
def test_unwritable_picture_fails_in_one_line(benchmarks_cli, tmp_path, command):
    (tmp_path / "file.svg").touch()
    (tmp_path / "folder.svg").mkdir()
    for path in (tmp_path / "folder.svg", tmp_path / "file.svg" / "x.svg"):
        result = benchmarks_cli(*command, "--out", path)
        assert result.code == 1
        assert result.err.startswith("clearhead: ")
        assert len(result.err.splitlines()) == 1
        assert str(path) in result.err
    result = benchmarks_cli(*command, "--out", tmp_path / "x.txt")
    assert (result.code, len(result.err.splitlines())) == (1, 1)
    assert ".svg" in result.err
