"""What each document asserts, sentence by sentence, and the entry of the ledger that tries it, or why none can.

The lists are data (`assertions/000.toml` …), by place and in our own words. A sentence is pointed at by its line and a
hash of its text, so that nothing is copied; `python tools/assertions.py` compares a list with the document itself."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from typing import Any

from clearhead.claims.ledger import DOCUMENTS, ClaimError, claims
from clearhead.values import require_known

NAMES = tuple(f"{i:03}" for i in range(len(DOCUMENTS)))

# Why an assertion is not tried.
REASONS = {
    "definition": "it says what a word, a letter or a layer is to stand for",
    "opinion": "a judgement or an advice, with no measure by which it could fail",
    "report": "it tells of data, trainings or habits of others, which are not at hand",
    "tendency": "what training may lead to in large models, with nothing said that could be counted",
}
# What asserts nothing.
SILENT = {
    "heading": "a title, a number, a name",
    "question": "something is asked",
    "instruction": "something is to be done",
}


@dataclass(frozen=True)
class Assertion:
    """One thing that a document says: where, in our words, and what becomes of it."""

    location: str
    statement: str
    at: tuple[str, ...]
    claims: tuple[str, ...] = ()
    reason: str = ""
    why: str = ""

    @property
    def accounted(self) -> bool:
        """It points at a sentence, and names entries that exist or a reason that is known."""
        return bool(self.at) and (set(self.claims) <= set(claims()) if self.claims else self.reason in REASONS)


@dataclass(frozen=True)
class Ledger:
    """A document's list: what it asserts, and the sentences that assert nothing."""

    name: str
    source: str
    assertions: tuple[Assertion, ...]
    silent: dict[str, tuple[str, ...]]

    @property
    def pointers(self) -> set[str]:
        return {at for a in self.assertions for at in a.at} | {at for ats in self.silent.values() for at in ats}

    def to_dict(self) -> dict[str, Any]:
        """Shares: how many sentences, how many assertions, and what became of them."""
        n, accounted = len(self.assertions), sum(a.accounted for a in self.assertions)
        reasons = Counter(a.reason for a in self.assertions if not a.claims)
        about = {"document": self.name, "source": self.source, "sentences": len(self.pointers), "assertions": n}
        tried = {"tried": sum(bool(a.claims) for a in self.assertions)}
        tried |= {f"not tried: {name}": reasons[name] for name in REASONS}
        return about | tried | {"unaccounted": n - accounted, "share": round(accounted / n, 4)}


def ledger_of(name: str) -> Ledger:
    """The list of one document, by its number: ledger_of("002")."""
    require_known(name, NAMES, "no document is called", ClaimError, otherwise=f"they are {', '.join(NAMES)}")
    path = resources.files("clearhead.claims") / "assertions" / f"{name}.toml"
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = tuple(Assertion(**_frozen(row)) for row in data["assertion"])
    return Ledger(name, DOCUMENTS[NAMES.index(name)], rows, _frozen(data["silent"]))


def _frozen(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def coverage() -> list[Ledger]:
    """All five."""
    return [ledger_of(name) for name in NAMES]
