"""Is every sentence of a document accounted for? `python tools/assertions.py DOCUMENT.txt` reads it where it lies.

The documents are not in the repository, and their sentences are not copied into it. The lists in
`clearhead/claims/assertions/` point at a sentence by its line and by a hash of its text, and say in our own words what
it asserts. This names the sentences that nothing points at, and the pointers that find no sentence."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from clearhead.claims import ClaimError, ledger_of

# What ends in a full stop and ends no sentence.
_SHORT = re.compile(r"\b(?:e\.g|i\.e|ie|vs|eqs?|Pr|num|dim|cf|resp)\.$")
_BULLET = re.compile(r"^\s*(?:#+\s+|[-*☐]\s+|\d+[.:]\s+|\([a-z]+\)\s+)+")
_END = re.compile(r"(?<=[.?!])[*\"”’)]*\s+(?=[A-Z$*\"“(\[\\])")
_FORMULA = re.compile(r"\$\$.*?\$\$|\$.*?\$")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Every sentence with its line: a displayed formula, a row of a table and a listing count as one each."""
    listing: list[str] | None = None
    began = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            if listing is not None:
                yield began, " ".join(listing)
            listing, began = ([], number) if listing is None else (None, 0)
        elif listing is not None:
            listing.append(line)
        elif any(c.isalnum() for c in line):
            for part in _split(_BULLET.sub("", line)):
                yield number, part


def _split(line: str) -> Iterator[str]:
    """At the ends of sentences that stand outside of formulas."""
    hidden = _FORMULA.sub(lambda found: "x" * len(found[0]), line)
    began = 0
    for end in _END.finditer(hidden):
        if not _SHORT.search(hidden[: end.start()]):
            yield line[began : end.end()]
            began = end.end()
    yield line[began:]


def pointer(number: int, sentence: str) -> str:
    """Line and hash; blanks and the marks of bold type do not count."""
    plain = " ".join(sentence.replace("*", " ").split())
    return f"{number}:{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def known(text: str) -> dict[str, str]:
    """Pointer → sentence, without what is only a mark or a blank."""
    return {pointer(n, s): " ".join(s.split()) for n, s in sentences(text) if any(c.isalnum() for c in s)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("--name", help="which list to read; by default the first three signs of the file's name")
    parser.add_argument("--all", action="store_true", help="every sentence with its pointer, to make a list from")
    chosen = parser.parse_args(arguments)
    try:
        found = known(chosen.document.read_text(encoding="utf-8"))
        if chosen.all:
            print("\n".join(f"{at}  {sentence}" for at, sentence in found.items()))
            return 0
        listed = ledger_of(chosen.name or chosen.document.name[:3]).pointers
    except (OSError, UnicodeError, ClaimError) as error:
        print(f"assertions: {error}", file=sys.stderr)
        return 1
    left = {at: sentence for at, sentence in found.items() if at not in listed}
    stale = sorted(listed - set(found))
    for at, sentence in left.items():
        print(f"nothing points at {at}  {sentence}")
    for at in stale:
        print(f"no sentence is at {at}")
    print(f"{len(found)} sentences, {len(left)} left over, {len(stale)} pointers astray")
    return 1 if left or stale else 0


if __name__ == "__main__":
    sys.exit(main())
