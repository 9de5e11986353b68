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
    for values in islice(_draws(source, original.name, seed // _TURNS), seed % _TURNS, _TRIES * _TURNS, _TURNS):
        made = Problem(f"{original.name}-seed-{seed}", toml_document(_labelled(values, source, seed)))
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


def _labelled(values: dict[str, Any], source: Source, seed: int) -> dict[str, Any]:
    """What a document says is of its own numbers, and left out."""
    after = f"{source.text('source')}, with" if source.text("source") else "With"
    return {key: value for key, value in values.items() if key not in ("document", "mistake")} | {
        "source": f"{after} other numbers (seed {seed})"
    }


def _is_like(work: Work, original: Work) -> bool:
    """Whether a sheet asks the same steps, none of them duller, and is not much longer to write."""
    if [step.key for step in work.steps] != [step.key for step in original.steps]:
        return False
    if [step.grid for step in work.steps] == [step.grid for step in original.steps]:
        return False  # the same numbers, written in another way
    if any(_dull(new) > _dull(old) for new, old in zip(work.steps, original.steps, strict=True)):
        return False
    return _ink(work) <= 1.5 * _ink(original) + 100


def _numbers(step: Step) -> list[Any]:
    return [x for x in step.grid.flat if not isinstance(x, str)]


def _dull(step: Step) -> bool:
    """Whether all numbers of a step are the same, or nearly all of them zero."""
    numbers = _numbers(step)
    zeros = sum(x == 0 for x in numbers)
    return len(numbers) > 1 and (len(set(numbers)) == 1 or 4 * zeros > 3 * len(numbers))


def _ink(work: Work) -> int:
    return sum(len(written(x)) for step in work.steps for x in _numbers(step))
