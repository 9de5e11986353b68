"""`clearhead check` in process."""

from __future__ import annotations

import json
import sys

import pytest

from clearhead.cli.app import app
from clearhead.cli.app import run as run_command
from clearhead.models import save_checkpoint, tiny_decoder
from tests.support.terminal import use_terminal

MODULE = """
from clearhead.analysis.checks.buggy_modules import CORRECT, GALLERY
def right():
    return CORRECT["reader"]()
def wrong():
    return GALLERY["no causal mask"].spec()
def needs(argument):
    return argument
def broken():
    raise RuntimeError("no parameters")
number = 3

import torch
from torch import nn
from clearhead.analysis.checks import Ids, ModuleSpec

class GPT(nn.Module):
    # A language model without a causal mask.
    def __init__(self):
        super().__init__()
        self.embedding, self.q, self.k = nn.Embedding(50, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 50)
    def scores(self, x):
        return self.q(x) @ self.k(x).transpose(-2, -1) / 12**0.5
    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.scores(x).softmax(-1) @ x)

class Masked(GPT):
    # The same with a causal mask.
    def scores(self, x):
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return super().scores(x).masked_fill(future, float("-inf"))

class Features(nn.Linear):
    # Takes and returns a vector, not a sequence.
    def __init__(self):
        super().__init__(7, 3)

def with_spec():
    return ModuleSpec(GPT(), inputs=Ids(50))
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command in a folder with a module: exit status, standard output and error."""
    (tmp_path / "mine_to_check.py").write_text(MODULE)
    (tmp_path / "unfinished.py").write_text("def GPT(\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("mine_to_check", None)
    monkeypatch.setattr(app, "registered_callback", None)  # options such as --version are not tested here

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "check", *arguments])
        with pytest.raises(SystemExit) as ending:
            run_command()
        captured = capsys.readouterr()
        return int(ending.value.code or 0), captured.out, captured.err

    return call


def test_command_correct_factory_exits_with_zero(run):
    status, out, error = run("mine_to_check:right")
    assert status == 0, error
    assert "permutation equivariance" in out
    assert "fail" not in out


def test_command_incorrect_factory_exits_with_one(run):
    status, out, _ = run("mine_to_check:wrong")
    assert status == 1
    assert "no causal mask reaches the attention" in out
    assert "example" in out


def test_command_json_contains_findings(run):
    status, out, _ = run("mine_to_check:wrong", "--json", "--only", "causality", "--only", "finiteness")
    assert status == 1
    findings = {f["property"]: f for f in json.loads(out)["findings"]}
    assert set(findings) == {"causality", "finiteness"}
    assert findings["causality"]["verdict"] == "fail"
    assert findings["finiteness"]["verdict"] == "pass"
    assert {"property", "verdict", "max_abs_difference", "location", "cause"} <= set(findings["causality"])


def test_command_accepts_model_folder(run, tmp_path):
    save_checkpoint(tiny_decoder().build(), tmp_path / "kept")
    status, out, error = run("kept", "--only", "cache = no cache")
    assert status == 0, error
    assert "Decoder" in out


def test_command_in_a_terminal_shows_the_running_property(run, monkeypatch):
    arguments = ("mine_to_check:right", "--only", "causality")
    assert "preparing" not in run(*arguments)[1]  # of a pipe
    use_terminal(monkeypatch)
    status, out, error = run(*arguments)
    assert status == 0, error
    progress = out[: out.index("mine_to_check:right")]
    assert "preparing" in progress
    assert "causality" in progress
    assert "preparing" not in run(*arguments, "--json")[1]


def test_command_accepts_bundled_model(run):
    status, out, error = run("sort-dedup", "--only", "causality")
    assert status == 0, error
    assert "pass" in out


@pytest.mark.parametrize("name", ["GPT", "with_spec"])
def test_command_unknown_causality_is_undecided(run, name):
    ids = () if name == "with_spec" else ("--vocab-size", "50")
    status, out, _ = run(f"mine_to_check:{name}", *ids)
    assert status == 1
    row = next(line for line in out.splitlines() if line.startswith("causality"))
    assert "undecided" in row
    output = " ".join(out.split())  # without the line breaks of the terminal
    loud = output[output.index("? causality: UNDECIDED") :]
    assert "it is unknown whether this model is causal" in loud
    assert "--causal" in loud
    assert "--not-causal" in loud

    status, out, _ = run(f"mine_to_check:{name}", *ids, "--json")
    assert status == 1
    document = json.loads(out)
    assert document["undecided"] == ["causality"]
    finding = next(f for f in document["findings"] if f["property"] == "causality")
    assert finding["verdict"] == "undecided"
    assert finding["max_abs_difference"] > finding["tolerance"]


@pytest.mark.parametrize(
    ("arguments", "status", "verdict"),
    [
        (("mine_to_check:GPT", "--vocab-size", "50", "--causal"), 1, "fail"),
        (("mine_to_check:GPT", "--vocab-size", "50", "--not-causal"), 0, "not applicable"),
        (("mine_to_check:with_spec", "--causal"), 1, "fail"),
        (("mine_to_check:Masked", "--vocab-size", "50", "--causal"), 0, "pass"),
        (("mine_to_check:Masked", "--vocab-size", "50"), 0, "pass"),
        (("mine_to_check:Masked", "--input-dim", "12", "--causal"), 1, None),  # it reads ids
        (("mine_to_check:Features", "--input-shape", "7"), 0, "not applicable"),
    ],
)
def test_command_options_decide_verdict(run, arguments, status, verdict):
    got, out, error = run(*arguments, "--json")
    assert got == status, out + error
    if verdict is not None:
        findings = {f["property"]: f for f in json.loads(out)["findings"]}
        assert findings["causality"]["verdict"] == verdict
    else:
        assert error.startswith("clearhead: Masked could not be called with embeddings 3 × 11 × 12")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mine_to_check:GPT",), "clearhead: cannot infer the inputs of GPT; pass inputs=Ids(vocab_size), "),
        (
            ("mine_to_check:GPT", "--vocab-size", "0"),
            "clearhead: vocab_size is 0; expected a whole number of at least 1",
        ),
        (("mine_to_check:GPT", "--vocab-size", "5", "--input-dim", "7"), "clearhead: a module takes one kind of input"),
        (
            ("mine_to_check:GPT", "--input-shape", "3,x"),
            "clearhead: --input-shape is '3,x'; expected sizes separated by commas",
        ),
        (("en-ex",), "clearhead: 'en-ex' is not a bundled model, a folder or a file"),
        ((":x",), "clearhead: ':x' does not name a Python module; expected package.module:factory"),
        ((".x:y",), "clearhead: '.x:y' does not name a Python module; expected package.module:factory"),
        (("not_there_at_all:make",), "clearhead: 'not_there_at_all' cannot be imported"),
        (("mine_to_check:absent",), "clearhead: mine_to_check has no 'absent'"),
        (("mine_to_check:number",), "clearhead: mine_to_check:number has the type int; expected a function"),
        (
            ("mine_to_check:needs",),
            "clearhead: mine_to_check:needs could not be called without arguments: TypeError: needs() missing 1",
        ),
        (
            ("mine_to_check:broken",),
            "clearhead: mine_to_check:broken could not be called without arguments: RuntimeError: no parameters (at /",
        ),
        (
            ("mine_to_check.py:GPT",),
            "clearhead: 'mine_to_check.py:GPT' does not name a Python module; expected package.module:factory, without",
        ),
        (("unfinished:GPT",), "clearhead: 'unfinished' cannot be imported from /"),
        (("mine_to_check:right", "--only", "leak"), "clearhead: unknown property 'leak'; there are:"),
    ],
)
def test_command_invalid_arguments_print_one_line(run, arguments, message):
    status, _, error = run(*arguments)
    assert status == 1
    assert error.startswith(message)
    assert error.count("\n") == 1
