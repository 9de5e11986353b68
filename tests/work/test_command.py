"""`clearhead work`, run as a person would."""

from __future__ import annotations

import json
import sys

import pytest

from clearhead.cli.app import run as run_command
from clearhead.work import shipped


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: exit status, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "work", *arguments])
        with pytest.raises(SystemExit) as ending:
            run_command()
        shown = capsys.readouterr()
        return int(ending.value.code or 0), shown.out, shown.err

    return call


def test_without_an_argument_it_lists_the_problems(run):
    status, out, _ = run()
    assert status == 0
    assert all(name in out for name in shipped())
    assert {row["name"] for row in json.loads(run("--format", "json")[1])} == set(shipped())


def test_a_sheet_in_each_format(run):
    begins = {
        "terminal": "The length",
        "markdown": "# The length",
        "latex": "\\documentclass",
        "html": "<!doctype html>",
    }
    for way, begin in begins.items():
        status, out, error = run("layer-norm-identity", "--format", way, "--digits", "7")
        assert (status, error) == (0, "")
        assert out.startswith(begin)
        assert "5.2500000" in out
    document = json.loads(run("layer-norm-identity", "--format", "json")[1])
    assert document["steps"][7]["exact"] == [["21/4"]] or any(s["exact"] == [["21/4"]] for s in document["steps"])


def test_a_seed_gives_new_numbers_and_the_same_seed_the_same(run, tmp_path):
    first, again, other = (run("layer-norm-identity", "--seed", seed, "--format", "json")[1] for seed in "778")
    assert first == again != other
    assert json.loads(first)["name"] == "layer-norm-identity-seed-7"
    mean = next(step for step in json.loads(first)["steps"] if step["key"] == "mean")["exact"][0][0]
    (tmp_path / "a.toml").write_text(f'mean = "{mean}"\n')
    assert run("layer-norm-identity", "--seed", "7", "--check", str(tmp_path / "a.toml"))[0] == 0
    assert run("layer-norm-identity", "--seed", "-1")[0] == 2


def test_blank(run):
    status, out, _ = run("layer-norm-identity", "--blank")
    assert status == 0
    assert "21/4" not in out
    assert "________" in out


def test_a_file_of_ones_own_and_its_answers(run, tmp_path):
    problem, answers = tmp_path / "mine.toml", tmp_path / "answers.toml"
    problem.write_text('kind = "layer-norm"\ntitle = "Mine"\nx = [1, 3, 5]\n')
    assert run(str(problem))[0] == 0
    answers.write_text('mean = 3\nvariance = "8/3"\nz = ["-sqrt(6)/2", 0, 1.2247]\n')
    status, out, _ = run(str(problem), "--check", str(answers))
    assert status == 0
    assert "5 of 5 cells right" in out
    answers.write_text("mean = 3\nvariance = 4\n")  # divided by d − 1
    status, out, _ = run(str(problem), "--check", str(answers))
    assert status == 1
    assert "got 4, expected 8/3" in out
    status, out, _ = run(str(problem), "--check", str(answers), "--format", "json")
    assert status == 1
    assert json.loads(out)["right"] is False


def test_a_bad_file_is_one_line_and_status_1(run, tmp_path):
    problem = tmp_path / "bad.toml"
    problem.write_text('kind = "attention"\nx = [[1, 2],\n [3]]\n')
    status, out, error = run(str(problem))
    assert (status, out) == (1, "")
    assert error == ("clearhead: bad.toml, line 3: row 2 of x has 1 numbers and row 1 has 2; give each row as many\n")


def test_wrong_usage_is_status_2(run):
    assert run("sort-dedup", "--format", "pdf")[0] == 2
