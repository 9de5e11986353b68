"""`python -m benchmarks study` and `plot study`: results file, conclusion, plot, list and errors."""

from __future__ import annotations

import json

import pytest

from benchmarks import studies


def test_study_command_writes_results_and_plot(benchmarks_cli, tmp_path):
    out = tmp_path / "s.json"
    result = benchmarks_cli("study", "heads", "--smoke", "--seeds", 1, "--out", out, "--json")
    assert result.code == 0
    assert result.json == json.loads(out.read_text())
    result = benchmarks_cli("study", "heads", "--smoke", "--seeds", 1, "--out", out)
    assert "Accuracy by number of heads" in " ".join(result.out.split())
    assert benchmarks_cli("plot", "study", out).code == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert {study["name"] for study in benchmarks_cli("study", "--json").json} == set(studies.STUDIES)
    assert "no-attention-bottleneck" in benchmarks_cli("study").out


@pytest.mark.bad_input
def test_study_command_with_invalid_input_prints_one_line(benchmarks_cli, tmp_path):
    (tmp_path / "s.json").write_text('{"study": "heads"}')
    for arguments, message in (
        (("study", "head"), "did you mean 'heads'"),
        (("study", "heads", "--out", tmp_path / "s.json"), "cannot be read as a study's results"),
        (("plot", "study", tmp_path / "none.json"), "python -m benchmarks study NAME --out FILE"),
        (("plot", "study", tmp_path / "s.json", "-o", "x.txt"), "cannot be read"),
    ):
        result = benchmarks_cli(*arguments)
        assert result.code == 1
        assert message in result.err
        assert len(result.err.splitlines()) == 1
    assert (tmp_path / "s.json").read_text() == '{"study": "heads"}'
