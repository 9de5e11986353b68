"""Check that every sentence of a document is accounted for: `python tools/claim_coverage.py DOCUMENT.txt`.

The documents are not in the repository, and their sentences are not copied into it. The lists in
`clearhead/course/claims/assertions/` reference a sentence by its line and a hash of its text, and paraphrase it. This
prints the sentences without a reference, and the references without a sentence."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from clearhead.course.claims import ClaimError, ledger_of

# Abbreviations whose full stop does not end a sentence.
_SHORT = re.compile(r"\b(?:e\.g|i\.e|ie|vs|eqs?|Pr|num|dim|cf|resp)\.$")
_BULLET = re.compile(r"^\s*(?:#+\s+|[-*☐]\s+|\d+[.:]\s+|\([a-z]+\)\s+)+")
_END = re.compile(r"(?<=[.?!])[*\"”’)]*\s+(?=[A-Z$*\"“(\[\\])")
_FORMULA = re.compile(r"\$\$.*?\$\$|\$.*?\$")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield every sentence with its line; a displayed formula, a table row and a listing count as one each."""
    listing: list[str] | None = None
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            if listing is not None:
                yield start, " ".join(listing)
            listing, start = ([], number) if listing is None else (None, 0)
        elif listing is not None:
            listing.append(line)
        elif any(c.isalnum() for c in line):
            for part in _split(_BULLET.sub("", line)):
                yield number, part


def _split(line: str) -> Iterator[str]:
    """Split at the ends of sentences outside formulas."""
    hidden = _FORMULA.sub(lambda sentences_by_pointer: "x" * len(sentences_by_pointer[0]), line)
    start = 0
    for end in _END.finditer(hidden):
        if not _SHORT.search(hidden[: end.start()]):
            yield line[start : end.end()]
            start = end.end()
    yield line[start:]


def pointer(number: int, sentence: str) -> str:
    """Return line and hash, ignoring whitespace and bold markers."""
    plain = " ".join(sentence.replace("*", " ").split())
    return f"{number}:{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def sentences_of(text: str) -> dict[str, str]:
    """Return sentences by pointer, without lines of punctuation or whitespace."""
    return {pointer(n, s): " ".join(s.split()) for n, s in sentences(text) if any(c.isalnum() for c in s)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("--name", help="slug of the course document; default: the file name without its extension")
    parser.add_argument("--all", action="store_true", help="print every sentence with its pointer")
    options = parser.parse_args(arguments)
    try:
        sentences_by_pointer = sentences_of(options.document.read_text(encoding="utf-8"))
        if options.all:
            print("\n".join(f"{at}  {sentence}" for at, sentence in sentences_by_pointer.items()))
            return 0
        pointers = ledger_of(options.name or options.document.stem).pointers
    except (OSError, UnicodeError, ClaimError) as error:
        print(f"claim_coverage: {error}", file=sys.stderr)
        return 1
    unreferenced = {at: sentence for at, sentence in sentences_by_pointer.items() if at not in pointers}
    stale = sorted(pointers - set(sentences_by_pointer))
    for at, sentence in unreferenced.items():
        print(f"no reference to {at}  {sentence}")
    for at in stale:
        print(f"no sentence at {at}")
    print(
        f"{len(sentences_by_pointer)} sentences, {len(unreferenced)} without a reference, {len(stale)} stale references"
    )
    return 1 if unreferenced or stale else 0


if __name__ == "__main__":
    sys.exit(main())
