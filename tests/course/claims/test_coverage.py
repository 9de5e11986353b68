"""Every assertion of the five documents is accounted for; the script that compares the lists with the documents."""

from __future__ import annotations

import json
import re

import pytest

from clearhead.course.claims import DOCUMENTS, claims, coverage, ledger_of
from clearhead.course.claims.coverage import NAMES, REASONS, SILENT, Assertion, Ledger
from tools import assertions as tool


@pytest.mark.parametrize("name", NAMES)
def test_coverage_accounts_for_every_assertion(name):
    found = ledger_of(name)
    assert len(found.assertions) >= 20
    for a in found.assertions:
        assert a.accounted, a
        assert a.location, a
        assert a.statement.endswith("."), a
        assert a.claims or a.reason, a
        assert not (a.claims and a.reason), a
        assert set(a.claims) <= set(claims()), a
    assert set(found.silent) == set(SILENT)
    assert all(re.fullmatch(r"\d+:[0-9a-f]{8}", at) for at in found.pointers)


def test_every_claim_is_referenced_by_its_document():
    for found in coverage():
        named = {name for a in found.assertions for name in a.claims}
        own = {c.id for c in claims().values() if c.source == found.source}
        assert own <= named, own - named


def test_unaccounted_assertions_are_counted():
    good = Assertion("here", "A thing.", ("1:00000000",), claims=("rnn-update",))
    bad = [
        Assertion("here", "A thing.", ("1:00000000",)),
        Assertion("here", "A thing.", ("1:00000000",), claims=("rnn-update", "no-such-claim")),
        Assertion("here", "A thing.", ("1:00000000",), reason="laziness"),
        Assertion("here", "A thing.", (), claims=("rnn-update",)),
    ]
    found = Ledger("000", DOCUMENTS[0], (good, *bad), {"heading": ("2:00000000",)}).to_dict()
    assert (found["sentences"], found["assertions"], found["unaccounted"], found["share"]) == (2, 5, 4, 0.2)


def test_coverage_command_prints_counts(run):
    status, out, error = run("coverage", "--json")
    assert status == 0, error
    documents = json.loads(out)["documents"]
    assert [d["document"] for d in documents] == list(NAMES)
    for d in documents:
        assert d["unaccounted"] == 0
        assert d["share"] == 1
        assert d["tried"] + sum(d[f"not tried: {reason}"] for reason in REASONS) == d["assertions"]
    status, out, error = run("coverage", "003")
    assert status == 0, error
    assert "theta-line-numbers" in out
    assert "not tried: definition" in out
    status, out, _ = run("coverage", "003", "--json")
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
    assert [(n, " ".join(s.split())) for n, s in tool.sentences(TEXT)] == [
        (1, "A title"),
        (3, "Attention has weights (e.g. from a softmax)."),
        (3, "They sum to $1.0. Always$ for each row."),
        (5, "**A row.**"),
        (5, "Is it long?"),
        (7, "$$a = b. C = d$$"),
        (9, "one two. Three"),
    ]


def test_unreferenced_sentences_are_printed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "000_text.txt"
    path.write_text(TEXT, encoding="utf-8")
    found = list(tool.sentences_of(TEXT))
    whole = Ledger("000", DOCUMENTS[0], (Assertion("here", "It.", tuple(found[1:])),), {"heading": (found[0],)})
    monkeypatch.setattr(tool, "ledger_of", lambda name: whole)
    assert tool.main([str(path)]) == 0
    assert capsys.readouterr().out == "7 sentences, 0 left over, 0 pointers astray\n"
    path.write_text(TEXT.replace("Is it long?", "It is long."), encoding="utf-8")
    assert tool.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"nothing points at 5:\w+  It is long\.", out)
    assert f"no sentence is at {found[4]}\n" in out
    assert "7 sentences, 1 left over, 1 pointers astray" in out


def test_study_script_reports_errors_in_one_line(tmp_path, capsys):
    assert tool.main([str(tmp_path / "none.txt")]) == 1
    (tmp_path / "other.txt").write_text("A sentence.")
    assert tool.main([str(tmp_path / "other.txt")]) == 1
    assert capsys.readouterr().err.count("assertions: ") == 2
