"""The course documents: every question has an answer, and every command that answers one runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from clearhead.course.claims import DOCUMENTS, claims
from clearhead.course.claims.papers import MARKS
from clearhead.course.claims.papers import POINTS as PARTS
from clearhead.course.exercises import bundled_problems, solve
from clearhead.course.sources import document, documents
from clearhead.errors import ClearheadError

DOCUMENTS_BY_SLUG = documents()
COMMANDS = sorted({a.command for d in DOCUMENTS_BY_SLUG.values() for q in d.questions for a in q.answers})

# Questions of each document, counted by hand.
QUESTIONS = {
    "ceng403-exam": "Q1a Q1b Q2a Q2b Q3a Q3b Q4a Q4b Q4c Q5a Q5b Q5c Q6a Q6b Q7a Q7b",
    "ceng403-answered": "Q1a Q1b Q1c Q1d Q2a Q2b Q2c",
    "csci2572-homework": "1.1a 1.1b 1.1c 1.1d 1.1e 1.1f 1.1g 1.2a 1.2b 1.3a 1.3b 1.3c 1.3d 1.3e 1.4a 1.4b 1.4c 1.4d "
    "1.4e 1.5a 1.5b 1.5c 1.5d",
    "transformer-exercises": "1(a) 2(a) 2(b) 2(c) 2(d) 3(a) 3(b)",
    "deep-learning-final": "Part1,Q1 Part1,Q2 Part1,Q3 Part1,Q4 Part1,Q5 Part1,Q6 Part1,Q7 Part1,Q8 Part2,Q1 Part2,Q2 "
    "Part2,Q3 Part3,1.1 Part3,1.2 Part3,1.3 Part3,1.4 Part3,2.1 Part3,2.2 Part3,2.3 Part3,2.4 Part3,2.5",
}
POINTS = dict.fromkeys(QUESTIONS, 0) | {"ceng403-exam": 150, "ceng403-answered": 55, "deep-learning-final": 100}


def test_documents_contain_every_question_with_answers():
    assert tuple(d.name for d in DOCUMENTS_BY_SLUG.values()) == DOCUMENTS
    for slug, locations in QUESTIONS.items():
        assert [q.location.replace(" ", "") for q in DOCUMENTS_BY_SLUG[slug].questions] == locations.split()
        assert sum(q.points for q in DOCUMENTS_BY_SLUG[slug].questions) == POINTS[slug]
        for question in DOCUMENTS_BY_SLUG[slug].questions:
            assert question.answers, question.location
            assert question.text.endswith((".", "?"))
            assert question.title
            assert not question.title.endswith(".")


def test_points_of_questions_equal_printed_points():
    printed = {
        "ceng403-exam": [points for _, parts in MARKS for points in parts],
        "ceng403-answered": [10, 5, 6, 4, 12, 10, 8],
        "deep-learning-final": [points for _, parts in PARTS.values() for points in parts],
    }
    for slug, points in printed.items():
        assert [question.points for question in DOCUMENTS_BY_SLUG[slug].questions] == points


# Other tests run claims and exercises; here only their names are checked, unless WHOLE is set (`make test-course`).
KIND_OF_COMMAND = {a.command: a.kind for d in DOCUMENTS_BY_SLUG.values() for q in d.questions for a in q.answers}
RUN_ALL = "WHOLE" in os.environ


@pytest.mark.parametrize("command", [c for c in COMMANDS if RUN_ALL or KIND_OF_COMMAND[c] not in ("claim", "exercise")])
def test_command_of_answer_runs(command, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli(*shlex.split(command.format(folder=tmp_path)))
    assert result.code == 0, result.err
    assert len(result.out) + sum(path.stat().st_size for path in tmp_path.iterdir()) > 100


def test_answers_name_registered_claims_and_every_exercise():
    names = {kind: {c.split()[-1] for c in COMMANDS if KIND_OF_COMMAND[c] == kind} for kind in ("claim", "exercise")}
    assert all(
        re.fullmatch(r"claims show [\w-]+|exercise solve [\w-]+", c) for c in COMMANDS if KIND_OF_COMMAND[c] in names
    )
    assert names["claim"] <= set(claims())
    assert names["exercise"] == set(bundled_problems())


def test_exam_steps_exist_in_exercise():
    for document_ in DOCUMENTS_BY_SLUG.values():
        for question in document_.questions:
            if question.steps:
                sheet = next(a.command.split()[2] for a in question.answers if a.kind == "exercise")
                assert set(question.steps) <= {step.key for step in solve(sheet).steps if not step.is_given}


def test_course_list_and_show_print_documents(cli):
    listing = cli("course", "list").out
    assert all(slug in listing for slug in DOCUMENTS_BY_SLUG)
    output = cli("course", "show", "csci2572-homework").out
    assert "   clearhead claims show attention-as-convolution\n" in output
    assert all(question.location in output for question in DOCUMENTS_BY_SLUG["csci2572-homework"].questions)
    assert [d["slug"] for d in cli("course", "list", "--json").json] == list(DOCUMENTS_BY_SLUG)
    question = cli("course", "show", "deep-learning-final", "--json").json["questions"][3]
    assert question["answers"][0]["kind"] == "exercise"
    assert question["answers"][0]["command"] == "clearhead exercise solve convolution-128"
    assert (
        cli("course", "show", "005").err
        == "clearhead: no course document '005'; expected one of ceng403-exam, ceng403-answered, csci2572-homework, "
        "transformer-exercises, deep-learning-final\n"
    )
    with pytest.raises(ClearheadError):
        document("5")


@pytest.mark.parametrize("line", ["course list", "course show csci2572-homework --json", "--help"])
def test_course_command_does_not_import_torch_or_sympy(line):
    code = (
        "import sys, atexit\n"
        "heavy = {'torch', 'sympy', 'numpy', 'matplotlib'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = ['clearhead', *{line.split()!r}]\n"
        "from clearhead.cli import main\nmain()\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stderr == "[]\n"
