"""New numbers for any problem: `variant("sort-dedup", 7)` is the same exercise as another student might get it.

Each kind of problem says how it varies (`vary`). Draws that cannot be worked, or that are duller or harder than the
original, are drawn again. Seeds take turns along one row of different draws, so that no two give the same sheet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from clearhead.config import toml_document
from clearhead.values import whole
from clearhead.work.draw import Draw
from clearhead.work.kinds import KINDS
from clearhead.work.problem import Problem, load, solve
from clearhead.work.sheet import Step, Work
from clearhead.work.show.layout import written
from clearhead.work.source import ProblemError, Source

_TURNS = 100  # seeds that share a row of draws
_TRIES = 40
_LONGEST_ROW = 50 * _TURNS


def variant(problem: str | Path | Problem, seed: int) -> Problem:
    """The problem with new numbers of the same difficulty; the same seed gives the same numbers."""
    seed = whole(seed, "seed")
    original = load(problem)
    source, worked = original.source, solve(original)
    told = f"{source.text('source')}, with" if source.text("source") else "With"
    told += f" other numbers (seed {seed})"
    for values in islice(_draws(source, original.name, seed // _TURNS), seed % _TURNS, _TRIES * _TURNS, _TURNS):
        # What a document says is of its own numbers, and left out.
        kept = {key: value for key, value in values.items() if key not in ("document", "mistake")}
        made = Problem(f"{original.name}-seed-{seed}", toml_document(kept | {"source": told}))
        try:
            work = solve(made)
        except ProblemError:
            continue
        if work.agrees and _is_like(work, worked):
            return made
    raise ProblemError(
        f"{original.name} has no variant of its difficulty for seed {seed}; give it larger or more numbers"
    )


def _draws(source: Source, name: str, row: int) -> Iterator[dict[str, Any]]:
    """Values for the file, no two the same, and none those of the file itself."""
    vary = KINDS[source.choice("kind", KINDS)].vary
    seen = {repr(source.values)}
    for number in range(_LONGEST_ROW):
        values = source.values | vary(source, Draw(f"{name} {row} {number}"))
        if repr(values) not in seen:
            seen.add(repr(values))
            yield values


def _is_like(work: Work, original: Work) -> bool:
    """Whether a sheet asks the same steps, none of them duller, and is not much longer to write."""
    if [step.key for step in work.steps] != [step.key for step in original.steps]:
        return False
    if [step.grid for step in work.steps] == [step.grid for step in original.steps]:
        return False  # the same numbers, written in another way
    if any(_dull(new) > _dull(old) for new, old in zip(work.steps, original.steps, strict=True)):
        return False
    new, old = (sum(len(written(x)) for step in of.steps for x in step.grid.numbers) for of in (work, original))
    return new <= 1.5 * old + 100


def _dull(step: Step) -> bool:
    """Whether all numbers of a step are the same, or nearly all of them zero."""
    numbers = step.grid.numbers
    zeros = sum(x == 0 for x in numbers)
    return len(numbers) > 1 and (len(set(numbers)) == 1 or 4 * zeros > 3 * len(numbers))
