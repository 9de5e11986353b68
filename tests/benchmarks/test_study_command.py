"""`python -m benchmarks study` and `plot study`: the results file, the finding, the picture and the list."""

from __future__ import annotations

import json

import pytest

from benchmarks import studies


def test_the_command_line(benchmarks_cli, tmp_path):
    out = tmp_path / "s.json"
    ran = benchmarks_cli("study", "heads", "--smoke", "--seeds", 1, "--out", out, "--json")
    assert ran.code == 0
    assert ran.json == json.loads(out.read_text())
    ran = benchmarks_cli("study", "heads", "--smoke", "--seeds", 1, "--out", out)
    assert "Labels right by number of heads" in " ".join(ran.out.split())
    assert benchmarks_cli("plot", "study", out).code == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert {one["name"] for one in benchmarks_cli("study", "--json").json} == set(studies.STUDIES)
    assert "fixed-vector" in benchmarks_cli("study").out


@pytest.mark.bad_input
def test_mistakes_are_one_line(benchmarks_cli, tmp_path):
    (tmp_path / "s.json").write_text('{"study": "heads"}')
    for arguments, told in (
        (("study", "head"), "did you mean 'heads'"),
        (("study", "heads", "--out", tmp_path / "s.json"), "cannot be read as a study's results"),
        (("plot", "study", tmp_path / "none.json"), "python -m benchmarks study NAME --out FILE"),
        (("plot", "study", tmp_path / "s.json", "-o", "x.txt"), "cannot be read"),
    ):
        ran = benchmarks_cli(*arguments)
        assert ran.code == 1
        assert told in ran.err
        assert len(ran.err.splitlines()) == 1
    assert (tmp_path / "s.json").read_text() == '{"study": "heads"}'
