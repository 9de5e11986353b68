"""Assertions of each course document, the claims that test them, or the reason why an assertion is not tested.

The lists are paraphrased data (`assertions/ceng403-exam.toml` …). A sentence is referenced by its line and a hash of
its text, so that no text is copied; `python tools/claim_coverage.py` compares a list with the document."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from typing import Any

from clearhead._core.validation import require_known
from clearhead.course.claims.registry import DOCUMENTS, ClaimError, claims
from clearhead.course.sources import SLUGS

# Reasons why an assertion is not tested.
REASONS = {
    "definition": "defines a word, a symbol or a layer",
    "opinion": "a judgment or advice without a measurable criterion",
    "report": "reports data, training runs or practices that are not available",
    "tendency": "describes tendencies of large models without a countable statement",
}
# What the share of assertions that are accounted for means.
ACCOUNTED_FOR = (
    "An assertion is accounted for if it names existing claims that test it, or a reason why it is not tested. Every "
    "sentence of a document belongs to an assertion or is a heading, a question or an instruction. This does not mean "
    "that the sentence is right (the verdicts of its claims say that), nor that each of its words is tested."
)
# Sentences without an assertion.
SILENT = {
    "heading": "a title, a number, a name",
    "question": "a question",
    "instruction": "an instruction",
}


@dataclass(frozen=True)
class Assertion:
    """An assertion of a document: location, paraphrase, and the claims that test it or the reason why none does."""

    location: str
    statement: str
    at: tuple[str, ...]
    claims: tuple[str, ...] = ()
    reason: str = ""
    why: str = ""

    @property
    def accounted(self) -> bool:
        """Whether it references a sentence, and existing claims or a valid reason."""
        return bool(self.at) and (set(self.claims) <= set(claims()) if self.claims else self.reason in REASONS)


@dataclass(frozen=True)
class Ledger:
    """The assertions of a document, and its sentences without an assertion."""

    name: str
    source: str
    assertions: tuple[Assertion, ...]
    silent: dict[str, tuple[str, ...]]

    @property
    def pointers(self) -> set[str]:
        return {at for a in self.assertions for at in a.at} | {at for ats in self.silent.values() for at in ats}

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of sentences and assertions, and how many are tested."""
        n = len(self.assertions)
        accounted = sum(a.accounted for a in self.assertions)
        reasons = Counter(a.reason for a in self.assertions if not a.claims)
        counts = {"document": self.name, "source": self.source, "sentences": len(self.pointers), "assertions": n}
        counts |= {"tested": sum(bool(a.claims) for a in self.assertions)}
        counts |= {f"untested_{name}": reasons[name] for name in REASONS}
        return counts | {"unaccounted": n - accounted, "share": round(accounted / n, 4)}


def ledger_of(name: str) -> Ledger:
    """Return the list of the assertions of one document.

    Args:
        name: Slug of the document, such as "csci2572-homework".

    Raises:
        ClaimError: The document is unknown.
    """
    require_known(name, SLUGS, "no document is called", ClaimError, fallback=f"they are {', '.join(SLUGS)}")
    path = resources.files("clearhead.course.claims") / "assertions" / f"{name}.toml"
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = tuple(Assertion(**_frozen(row)) for row in data["assertion"])
    return Ledger(name, DOCUMENTS[SLUGS.index(name)], rows, _frozen(data["silent"]))


def _frozen(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def coverage() -> list[Ledger]:
    """Return the lists of all course documents."""
    return [ledger_of(name) for name in SLUGS]
