"""The whole ledger runs, says something, and says the same again; its verdicts are those of the last review."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clearhead.course.claims import (
    DOCUMENTS,
    DOES_NOT_HOLD,
    HOLDS_CONDITIONALLY,
    MISPRINT,
    VERDICTS,
    ClaimError,
    claims,
    find,
    run,
)
from clearhead.course.claims.registry import claim

REVIEWED = json.loads((Path(__file__).parent / "verdicts.json").read_text(encoding="utf-8"))


def test_ledger_has_at_least_seventy_claims():
    known = claims()
    assert len(known) >= 70
    assert {c.source for c in known.values()} == set(DOCUMENTS)


def test_every_claim_has_verdict_and_evidence(outcomes):
    assert set(outcomes) == set(claims())
    for o in outcomes.values():
        assert o.verdict in VERDICTS
        assert o.evidence
        assert all(any(c.isalnum() for c in line) for line in o.evidence)
        if o.verdict == HOLDS_CONDITIONALLY:
            assert o.claim.condition, o.claim.id
            assert o.example_for, o.claim.id
            assert o.example_against, o.claim.id
        if o.verdict in (DOES_NOT_HOLD, MISPRINT):
            assert o.counter_example, o.claim.id
            assert o.correction, f"{o.claim.id} does not hold and offers no correct statement"


def test_verdicts_equal_reviewed_verdicts(outcomes):
    """A changed verdict is not an error of this test: look at the claim, then at this list."""
    assert {name: o.verdict for name, o in outcomes.items()} == REVIEWED


# Statements of one shape, which are judged by one rule.
ALIKE = [
    ("permutation-invariant-answered", "permutation-invariant-homework", "permutation-invariant-vision"),
    ("swap-changes-nothing", "cat-chased-dog", "permutation-invariant-answered"),
    ("key-noise-mean", "query-noise-mean"),  # small noise
    ("key-noise-beta", "scale-key-already-similar"),  # right up to a peak
    ("large-temperature-hard", "small-temperature-uniform"),  # a term of art, and its opposite
    ("scale-key-scores", "scale-key-weight", "scale-key-limit"),  # "for all", and not so
    ("attention-n2d", "attention-against-rnn"),  # O(n²d), without the projections
    ("heads-same-complexity", "heads-same-cost-homework"),
    ("decoder-masks", "encoder-decoder-masks"),  # "padding on the right"
    ("dedup-scores", "dedup-attention-printed", "dedup-representations"),  # a column, a row
    ("variance-printed-index", "infinity-norm-cases", "scale-by-length"),  # an index, bars, a letter
    ("sparse-saves", "minibatch-iterations", "heads-gradient-flow", "heads-redundancy"),  # "can", "may"
]


@pytest.mark.parametrize("names", ALIKE, ids=lambda names: names[0])
def test_similar_statements_have_same_verdict(names):
    assert len({REVIEWED[name] for name in names}) == 1


@pytest.mark.measured  # run-time checks of shapes are calls, too
def test_each_claim_takes_bounded_work(effort):
    """Each is tried in seconds, the whole ledger in well under a minute."""
    assert set(effort) == set(claims())
    for name, took in effort.items():
        assert took.calls < 5_000_000, name
        assert took.nbytes < 8 << 30, name
    assert sum(took.calls for took in effort.values()) < 40_000_000
    assert sum(took.nbytes for took in effort.values()) < 20 << 30


def test_run_with_same_seed_gives_same_outcome(outcomes, effort):
    """All but those that take the most work; of these one that trains."""
    again = [name for name, took in effort.items() if took.operations < 30_000] + ["causal-mask-essential"]
    assert len(again) > 100
    for second in run(again, seed=0):
        a, b = outcomes[second.claim.id].to_dict(), second.to_dict()
        a.pop("seconds"), b.pop("seconds")
        assert a == b


def test_run_with_other_seed_keeps_verdict(outcomes):
    (other,) = run(["jacobian-vanishes"], seed=5)
    assert other.evidence != outcomes["jacobian-vanishes"].evidence
    assert other.verdict == outcomes["jacobian-vanishes"].verdict


def test_study_file_contains_no_names_or_paths(outcomes):
    text = json.dumps([o.to_dict() for o in outcomes.values()], ensure_ascii=False)
    for word in ("Geoff", "John", "/work", "/tmp"):
        assert word not in text


@pytest.mark.bad_input
def test_find_of_unknown_id_suggests_nearest():
    with pytest.raises(ClaimError, match="no claim is called 'scale-key-wait'; did you mean 'scale-key-weight'"):
        find(["scale-key-wait"])


def test_duplicate_claim_id_raises():
    known = next(iter(claims().values()))
    with pytest.raises(ClaimError, match="two claims are called"):
        claim("a source", "a place")(known.function)


def nothing_is_said_of_how(t):
    """It has a statement alone."""


def test_claim_without_method_raises():
    with pytest.raises(ClaimError, match="'nothing-is-said-of-how' has one paragraph; expected the statement"):
        claim("a source", "a place")(nothing_is_said_of_how)


def test_claim_parses_docstring(monkeypatch):
    monkeypatch.setattr("clearhead.course.claims.registry._REGISTRY", found := {})
    monkeypatch.setattr("tests.course.claims.test_registry.SIZE", 1_000, raising=False)

    @claim("a source", "a place")
    def more_is_more(t):
        """More is
        more.

        Up to {SIZE:,}, and
        no further.
        Holds when
        there is x_{any}."""

    entry = found["more-is-more"]
    assert (entry.statement, entry.method) == ("More is more.", "Up to 1,000, and no further.")
    assert entry.condition == "there is x_{any}"
    assert (entry.source, entry.location, entry.theme) == ("a source", "a place", "test_registry")
    assert entry.function is more_is_more
