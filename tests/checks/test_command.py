"""`clearhead check`, run as a person would."""

from __future__ import annotations

import json
import sys

import pytest

from clearhead.cli.app import app
from clearhead.cli.app import run as run_command
from clearhead.models import save, tiny_decoder

MODULE = """
from clearhead.checks.gallery import CORRECT, GALLERY
def right():
    return CORRECT["reader"]()
def wrong():
    return GALLERY["no causal mask"].subject()
def needs(argument):
    return argument
number = 3
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command in this process, in a folder with a module: exit status, standard output, standard error."""
    (tmp_path / "mine_to_check.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("mine_to_check", None)
    monkeypatch.setattr(app, "registered_callback", None)  # --version and its like are not what is tested here

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "check", *arguments])
        with pytest.raises(SystemExit) as ending:
            run_command()
        shown = capsys.readouterr()
        return int(ending.value.code or 0), shown.out, shown.err

    return call


def test_a_factory_that_is_right(run):
    status, out, error = run("mine_to_check:right")
    assert status == 0, error
    assert "permutation equivariance" in out
    assert "fail" not in out


def test_a_factory_that_is_wrong(run):
    status, out, _ = run("mine_to_check:wrong")
    assert status == 1
    assert "no causal mask reaches the attention" in out
    assert "smallest" in out


def test_json(run):
    status, out, _ = run("mine_to_check:wrong", "--json", "--only", "future leak", "--only", "finiteness")
    assert status == 1
    findings = {f["property"]: f for f in json.loads(out)["findings"]}
    assert set(findings) == {"future leak", "finiteness"}
    assert findings["future leak"]["verdict"] == "fail"
    assert findings["finiteness"]["verdict"] == "pass"
    assert {"property", "verdict", "difference", "where", "cause"} <= set(findings["future leak"])


def test_a_folder(run, tmp_path):
    save(tiny_decoder().build(), tmp_path / "kept")
    status, out, error = run("kept", "--only", "cache = no cache")
    assert status == 0, error
    assert "Decoder" in out


def test_a_model_in_the_box(run):
    status, out, error = run("sort-dedup", "--only", "future leak")
    assert status == 0, error
    assert "pass" in out


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("en-ex",), "clearhead: there is no model 'en-ex'"),
        (("not_there_at_all:make",), "clearhead: 'not_there_at_all' cannot be imported"),
        (("mine_to_check:absent",), "clearhead: mine_to_check has no 'absent'"),
        (("mine_to_check:number",), "clearhead: mine_to_check:number is a int; expected a function"),
        (("mine_to_check:needs",), "clearhead: mine_to_check:needs could not be called without arguments"),
        (("mine_to_check:right", "--only", "leak"), "clearhead: there is no property 'leak'; there are:"),
    ],
)
def test_one_line_for_an_error(run, arguments, message):
    status, _, error = run(*arguments)
    assert status == 1
    assert error.startswith(message)
    assert error.count("\n") == 1
