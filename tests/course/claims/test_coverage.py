"""Every assertion of the five documents is accounted for, and the script that compares the lists with the documents."""

from __future__ import annotations

import json
import re

import pytest

from clearhead.course.claims import DOCUMENTS, claims, coverage, ledger_of
from clearhead.course.claims.coverage import REASONS, SILENT, Assertion, Ledger
from clearhead.course.sources import SLUGS
from tools import claim_coverage


@pytest.mark.parametrize("slug", SLUGS)
def test_ledger_accounts_for_every_assertion(slug):
    ledger = ledger_of(slug)
    assert len(ledger.assertions) >= 20
    for a in ledger.assertions:
        assert a.accounted, a
        assert a.location, a
        assert a.statement.endswith("."), a
        assert a.claims or a.reason, a
        assert not (a.claims and a.reason), a
        assert set(a.claims) <= set(claims()), a
    assert set(ledger.silent) == set(SILENT)
    assert all(re.fullmatch(r"\d+:[0-9a-f]{8}", at) for at in ledger.pointers)


def test_every_asserted_claim_is_referenced_by_its_document():
    for ledger in coverage():
        referenced = {name for a in ledger.assertions for name in a.claims}
        asserted = {c.id for c in claims().values() if c.source == ledger.source and c.is_asserted}
        assert asserted <= referenced, asserted - referenced


def test_statements_that_a_document_asks_about_are_not_assertions():
    """An exam that asks to discuss a trade-off does not assert it."""
    questions = {c.id for c in claims().values() if not c.is_asserted}
    assert questions == {"local-windows", "additive-multiplicative", "norm-placement", "initialization-matters"}
    assert not questions & {name for ledger in coverage() for a in ledger.assertions for name in a.claims}


def test_ledger_counts_unaccounted_assertions():
    valid = Assertion("Q1", "A thing.", ("1:00000000",), claims=("rnn-update",))
    invalid = [
        Assertion("Q1", "A thing.", ("1:00000000",)),
        Assertion("Q1", "A thing.", ("1:00000000",), claims=("rnn-update", "no-such-claim")),
        Assertion("Q1", "A thing.", ("1:00000000",), reason="laziness"),
        Assertion("Q1", "A thing.", (), claims=("rnn-update",)),
    ]
    counts = Ledger(SLUGS[0], DOCUMENTS[0], (valid, *invalid), {"heading": ("2:00000000",)}).to_dict()
    assert (counts["sentences"], counts["assertions"], counts["unaccounted"], counts["share"]) == (2, 5, 4, 0.2)


def test_coverage_command_prints_counts(run):
    status, out, error = run("coverage", "--json")
    assert status == 0, error
    documents = json.loads(out)["documents"]
    assert [d["document"] for d in documents] == list(SLUGS)
    for d in documents:
        assert d["unaccounted"] == 0
        assert d["share"] == 1
        assert d["tested"] + sum(d[f"untested_{reason}"] for reason in REASONS) == d["assertions"]
    assert "nor that each of its words is tested" in json.loads(out)["accounted_for"]
    status, out, error = run("coverage")
    assert status == 0, error
    assert out.split("document", 1)[1].split("\n", 1)[0].split()[-2:] == ["open", "share"]
    for d in documents:
        untested = d["assertions"] - d["tested"]
        row = [d["document"], *map(str, (d["sentences"], d["assertions"], d["tested"], untested, 0)), "100.0%"]
        assert row in [line.split() for line in out.splitlines()]
    status, out, error = run("coverage", "transformer-exercises")
    assert "An assertion is accounted for if it names existing claims" in out
    assert status == 0, error
    assert "theta-line-numbers" in out
    assert "not tested: definition" in out
    status, out, _ = run("coverage", "transformer-exercises", "--json")
    assert len(json.loads(out)["list"]) == documents[3]["assertions"]


TEXT = """# A title

1. Attention has weights (e.g. from a softmax). They sum to $1.0. Always$ for each row.

- **A row.** Is it long?

$$a = b. C = d$$

```
one
two. Three
```
---
"""


def test_sentences_splits_document():
    assert [(n, " ".join(s.split())) for n, s in claim_coverage.sentences(TEXT)] == [
        (1, "A title"),
        (3, "Attention has weights (e.g. from a softmax)."),
        (3, "They sum to $1.0. Always$ for each row."),
        (5, "**A row.**"),
        (5, "Is it long?"),
        (7, "$$a = b. C = d$$"),
        (9, "one two. Three"),
    ]


def test_claim_coverage_prints_unreferenced_sentences(tmp_path, monkeypatch, capsys):
    path = tmp_path / "ceng403-exam.txt"
    path.write_text(TEXT, encoding="utf-8")
    pointers = list(claim_coverage.sentences_of(TEXT))
    assertions = (Assertion("Q1", "It.", tuple(pointers[1:])),)
    ledger = Ledger("ceng403-exam", DOCUMENTS[0], assertions, {"heading": (pointers[0],)})
    monkeypatch.setattr(claim_coverage, "ledger_of", {"ceng403-exam": ledger}.__getitem__)
    assert claim_coverage.main([str(path)]) == 0
    assert capsys.readouterr().out == "7 sentences, 0 without a reference, 0 stale references\n"
    path.write_text(TEXT.replace("Is it long?", "It is long."), encoding="utf-8")
    assert claim_coverage.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"no reference to 5:\w+  It is long\.", out)
    assert f"no sentence at {pointers[4]}\n" in out
    assert "7 sentences, 1 without a reference, 1 stale references" in out


def test_claim_coverage_reports_errors_in_one_line(tmp_path, capsys):
    assert claim_coverage.main([str(tmp_path / "none.txt")]) == 1
    (tmp_path / "other.txt").write_text("A sentence.")
    assert claim_coverage.main([str(tmp_path / "other.txt")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert errors[1].startswith("claim_coverage: no document is called 'other'")
