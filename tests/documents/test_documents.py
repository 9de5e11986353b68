"""Every question of the five documents is answered, and every command that is said to answer one runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from clearhead.claims import DOCUMENTS, claims
from clearhead.documents import document, documents
from clearhead.errors import ClearheadError
from clearhead.work import bundled_problems, solve
from tests.cli.conftest import cli as cli  # the fixture

KNOWN = documents()
COMMANDS = sorted({a.command for d in KNOWN.values() for q in d.questions for a in q.answers})

# What the documents ask, counted by hand.
QUESTIONS = {
    "000": "Q1a Q1b Q2a Q2b Q3a Q3b Q4a Q4b Q4c Q5a Q5b Q5c Q6a Q6b Q7a Q7b",
    "001": "Q1a Q1b Q1c Q1d Q2a Q2b Q2c",
    "002": "1.1a 1.1b 1.1c 1.1d 1.1e 1.1f 1.1g 1.2a 1.2b 1.3a 1.3b 1.3c 1.3d 1.3e 1.4a 1.4b 1.4c 1.4d 1.4e "
    "1.5a 1.5b 1.5c 1.5d",
    "003": "1(a) 2(a) 2(b) 2(c) 2(d) 3(a) 3(b)",
    "004": "Part1,Q1 Part1,Q2 Part1,Q3 Part1,Q4 Part1,Q5 Part1,Q6 Part1,Q7 Part1,Q8 Part2,Q1 Part2,Q2 Part2,Q3 "
    "Part3,1.1 Part3,1.2 Part3,1.3 Part3,1.4 Part3,2.1 Part3,2.2 Part3,2.3 Part3,2.4 Part3,2.5",
}
POINTS = {"000": 150, "001": 55, "002": 0, "003": 0, "004": 100}


def test_every_question_is_there_and_has_an_answer():
    assert tuple(d.name for d in KNOWN.values()) == DOCUMENTS
    for number, places in QUESTIONS.items():
        assert [q.place.replace(" ", "") for q in KNOWN[number].questions] == places.split()
        assert sum(q.points for q in KNOWN[number].questions) == POINTS[number]
        for question in KNOWN[number].questions:
            assert question.answers, question.place
            assert question.asks.endswith(".")


# Claims are tried by tests/claims, and sheets worked by tests/work: here only that they are known, unless all are
# to be run (`make documents`).
KINDS = {a.command: a.kind for d in KNOWN.values() for q in d.questions for a in q.answers}
WHOLE = "WHOLE" in os.environ


@pytest.mark.parametrize("command", [c for c in COMMANDS if WHOLE or KINDS[c] not in ("claim", "sheet")])
def test_a_command_that_answers_a_question_runs(command, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = cli(*shlex.split(command.format(folder=tmp_path)))
    assert ran.code == 0, ran.err
    assert len(ran.out) + sum(path.stat().st_size for path in tmp_path.iterdir()) > 100


def test_claims_are_in_the_ledger_and_each_shipped_sheet_answers_a_question():
    named = {kind: {c.split()[-1] for c in COMMANDS if KINDS[c] == kind} for kind in ("claim", "sheet")}
    assert all(re.fullmatch(r"claims show [\w-]+|exercise solve [\w-]+", c) for c in COMMANDS if KINDS[c] in named)
    assert named["claim"] <= set(claims())
    assert named["sheet"] == set(bundled_problems())


def test_the_steps_that_an_exam_asks_for_are_those_of_the_sheet():
    for known in KNOWN.values():
        for question in known.questions:
            if question.steps:
                sheet = next(a.command.split()[2] for a in question.answers if a.kind == "sheet")
                assert set(question.steps) <= {step.key for step in solve(sheet).steps if not step.is_given}


def test_the_command(cli):
    listed = cli("course", "list").out
    assert all(number in listed for number in KNOWN)
    shown = cli("course", "show", "002").out
    assert "   clearhead claims show attention-as-convolution\n" in shown
    assert all(question.place in shown for question in KNOWN["002"].questions)
    assert [d["number"] for d in cli("course", "list", "--json").json] == list(KNOWN)
    one = cli("course", "show", "004", "--json").json["questions"][3]
    assert one["answers"][0]["kind"] == "sheet"
    assert one["answers"][0]["command"] == "clearhead exercise solve convolution-128"
    assert (
        cli("course", "show", "005").err == "clearhead: there is no document '005'; there are 000, 001, 002, 003, 004\n"
    )
    with pytest.raises(ClearheadError):
        document("5")


@pytest.mark.parametrize("line", ["course list", "course show 002 --json", "--help"])
def test_it_answers_without_torch_and_sympy(line):
    code = (
        "import sys, atexit\n"
        "heavy = {'torch', 'sympy', 'numpy', 'matplotlib'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = ['clearhead', *{line.split()!r}]\n"
        "from clearhead.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
