"""`clearhead claims quiz`: answers from standard input, and the score at the end."""

from __future__ import annotations

import io
import json
import sys

import pytest

from clearhead.course.claims import DOCUMENTS, VERDICTS, quiz
from clearhead.course.claims.registry import claims

VERDICT = {"rnn-update": "holds", "scale-key-weight": "does not hold", "infinity-norm-cases": "misprint"}


@pytest.fixture
def three_claims(monkeypatch):
    monkeypatch.setattr(quiz, "sample_claims", lambda n, seed, document: [claims()[name] for name in VERDICT][:n])


def test_quiz_with_same_seed_samples_same_claims():
    first, again, other = (quiz.sample_claims(12, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len({c.id for c in first}) == 12
    assert {c.source for c in quiz.sample_claims(500, 0, 4)} == {DOCUMENTS[4]}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("1", "holds"), ("2\n", "holds conditionally"), (" Holds ", "holds"), ("does", "does not hold"),
     ("mis", "misprint"),
     ("holds c", "holds conditionally"), ("0", None), ("5", None), ("", None), ("h", None), ("maybe", None)],
)  # fmt: skip
def test_parse_verdict_accepts_numbers_and_prefixes(text, verdict):
    assert quiz.parse_verdict(text) == verdict
    assert all(quiz.parse_verdict(v) == v for v in VERDICTS)


def test_quiz_reads_answers_from_pipe(run, three_claims, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("holds\nperhaps\n1\nmisprint\n"))
    status, out, error = run("quiz")
    assert status == 0, error
    assert out.count("Right.") == 2
    assert "'perhaps' is not an answer" in out
    assert "No: does not hold." in out
    assert "query -1: weight: 1/3 → 1/5" in out
    assert "clearhead claims show scale-key-weight" in out
    assert out.endswith("2 of 3 right (seed 0)\n")


def test_quiz_ends_at_end_of_input_or_q(run, three_claims, monkeypatch):
    for text in ("1\n", "1\nq\n3\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        status, out, _ = run("quiz")
        assert status == 0
        assert out.endswith("1 of 1 right (seed 0)\n")


def test_quiz_interrupt_prints_score(run, three_claims, monkeypatch):
    class Keyboard:
        lines = iter(["1\n", "3\n"])

        def readline(self) -> str:
            line = next(self.lines, None)
            if line is None:
                raise KeyboardInterrupt
            return line

    monkeypatch.setattr(sys, "stdin", Keyboard())
    status, out, _ = run("quiz")
    assert status == 0
    assert out.endswith("2 of 2 right (seed 0)\n")


def test_quiz_json_contains_answers(run, three_claims, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n1\n4\n"))
    status, out, error = run("quiz", "--json", "--seed", "2")
    assert status == 0, error
    document = json.loads(out)
    assert (document["seed"], document["right"], document["of"]) == (2, 2, 3)
    assert [(a["id"], a["verdict"]) for a in document["answers"]] == list(VERDICT.items())
    assert all(a["because"] for a in document["answers"])
