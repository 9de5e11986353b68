"""`clearhead exercise`, run in this process."""

from __future__ import annotations

import json
import sys

import pytest

from clearhead.cli.app import run as run_command
from clearhead.course.exercises import bundled_problems


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command; return the exit status, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "exercise", *arguments])
        with pytest.raises(SystemExit) as stop:
            run_command()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def test_list_names_every_exercise(run):
    status, out, _ = run("list")
    assert status == 0
    assert all(name in out for name in bundled_problems())
    assert {row["name"] for row in json.loads(run("list", "--json")[1])} == set(bundled_problems())


def test_solve_writes_each_format(run):
    openings = {
        "terminal": "The norm",
        "markdown": "# The norm",
        "latex": "\\documentclass",
        "html": "<!doctype html>",
    }
    for format, opening in openings.items():
        status, out, error = run("solve", "layer-norm-identity", "--format", format, "--digits", "7")
        assert (status, error) == (0, "")
        assert out.startswith(opening)
        assert "5.2500000" in out
    document = json.loads(run("solve", "layer-norm-identity", "--format", "json")[1])
    assert document["steps"][7]["exact"] == [["21/4"]] or any(s["exact"] == [["21/4"]] for s in document["steps"])


def test_solve_with_same_seed_gives_same_numbers(run, tmp_path):
    first, again, different = (
        run("solve", "layer-norm-identity", "--seed", seed, "--format", "json")[1] for seed in "778"
    )
    assert first == again != different
    assert json.loads(first)["name"] == "layer-norm-identity-seed-7"
    mean = next(step for step in json.loads(first)["steps"] if step["key"] == "mean")["exact"][0][0]
    (tmp_path / "a.toml").write_text(f'mean = "{mean}"\n')
    assert run("grade", "layer-norm-identity", "--seed", "7", str(tmp_path / "a.toml"))[0] == 0
    assert run("solve", "layer-norm-identity", "--seed", "-1")[0] == 2


def test_solve_questions_only_hides_answers(run):
    status, out, _ = run("solve", "layer-norm-identity", "--questions-only")
    assert status == 0
    assert "21/4" not in out
    assert "________" in out


def test_grade_with_problem_file_reports_wrong_cells(run, tmp_path):
    problem, answers = tmp_path / "mine.toml", tmp_path / "answers.toml"
    problem.write_text('kind = "layer-norm"\ntitle = "Mine"\nx = [1, 3, 5]\n')
    assert run("solve", str(problem))[0] == 0
    answers.write_text('mean = 3\nvariance = "8/3"\nz = ["-sqrt(6)/2", 0, 1.2247]\n')
    status, out, _ = run("grade", str(problem), str(answers))
    assert status == 0
    assert "5 of 5 cells right" in out
    answers.write_text("mean = 3\nvariance = 4\n")  # divided by d − 1
    status, out, _ = run("grade", str(problem), str(answers))
    assert status == 1
    assert "got 4, expected 8/3" in out
    status, out, _ = run("grade", str(problem), str(answers), "--json")
    assert status == 1
    assert json.loads(out)["right"] is False


def test_invalid_problem_file_prints_one_line_and_exits_with_1(run, tmp_path):
    problem = tmp_path / "bad.toml"
    problem.write_text('kind = "attention"\nx = [[1, 2],\n [3]]\n')
    status, out, error = run("solve", str(problem))
    assert (status, out) == (1, "")
    assert error == (
        "clearhead: bad.toml, line 3: row 2 of x has 1 numbers and row 1 has 2; give all rows the same length\n"
    )


def test_wrong_usage_exits_with_2(run, tmp_path):
    assert run("solve", "sort-dedup", "--format", "pdf")[0] == 2
    assert run("grade", "sort-dedup")[0] == 2
    assert run("grade", "multi-head", "a.py", "b.py")[0] == 2


def test_proof_prints_each_format(run):
    openings = {
        "terminal": "The attention weights",
        "markdown": "# The attention weights",
        "latex": "\\documentclass",
        "html": "<!doctype html>",
        "json": "{",
    }
    for format, begin in openings.items():
        status, out, _ = run("proof", "weights-sum-to-one", "--format", format)
        assert status == 0
        assert out.startswith(begin)
    assert "weights-sum-to-one" in run("proof")[1]
    assert {"name", "title"} == set(json.loads(run("proof", "--json")[1])[0])
    assert json.loads(run("proof", "weights-sum-to-one", "--json")[1])["verified_steps"] == 5
