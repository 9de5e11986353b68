"""New numbers for any problem: `variant("sort-dedup", 7)` is the same exercise with other values.

Each problem type defines how it varies (`vary`). Draws that cannot be solved, or that are more trivial or harder than
the original, are repeated. Blocks of seeds share one sequence of distinct draws, so that no two seeds give the
same worksheet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from clearhead._core.validation import check_int
from clearhead.config import toml_document
from clearhead.course.exercises.problem import Problem, read, solve
from clearhead.course.exercises.problem_types import PROBLEM_TYPES
from clearhead.course.exercises.problem_types.attention import take_numbers
from clearhead.course.exercises.random_values import RandomValues
from clearhead.course.exercises.render.layout import bounded_text
from clearhead.course.exercises.sheet import Worksheet, WorksheetStep
from clearhead.course.exercises.source import ProblemError, ProblemSource, ProblemValues

_SEEDS_PER_ROW = 100  # seeds that share a sequence of draws
_MAX_DRAWS = 200
_CELLS_RATIO = 2  # a variant has at most this times as many, or as few, numbers to find
_FEW_DRAWS = 10 * _SEEDS_PER_ROW  # of a problem whose seeds share them, if their own are unsuitable
_LONGEST_ROW = 250 * _SEEDS_PER_ROW


def variant(problem: str | Path | Problem, seed: int) -> Problem:
    """Return the problem with new numbers of the same difficulty.

    Args:
        problem: Path, name or `Problem`.
        seed: Non-negative integer; the same seed gives the same numbers.

    Returns:
        The variant, named after the problem and the seed.

    Raises:
        ProblemError: If no draw is as difficult as the original.
    """
    seed = check_int(seed, "seed")
    original = read(problem)
    source = original.source
    worked = solve(original)
    source_text = f"{source.text('source')}, with" if source.text("source") else "With"
    source_text += f" other numbers (seed {seed})"
    if "follows" in source.values:
        values = take_numbers(source, variant(source.text("follows"), seed).source.values)
        return _problem(f"{original.name}-seed-{seed}", source.values | values, source_text)
    row, column = divmod(seed, _SEEDS_PER_ROW)

    def problem_with(values: ProblemValues) -> Problem | None:
        problem = _problem(f"{original.name}-seed-{seed}", values, source_text)
        try:
            worksheet = solve(problem)
        except ProblemError:
            return None
        return problem if worksheet.agrees and _is_comparable(worksheet, worked) else None

    draws = _draws(source, original.name, row)
    candidates = islice(draws, column, _MAX_DRAWS * _SEEDS_PER_ROW, _SEEDS_PER_ROW)
    selected = next(filter(None, map(problem_with, candidates)), None)
    if selected is None:
        first_draws = list(islice(_draws(source, original.name, row), _FEW_DRAWS + 1))
        selected = _unused(first_draws, column, problem_with) if len(first_draws) <= _FEW_DRAWS else None
    if selected is not None:
        return selected
    raise ProblemError(
        f"{original.name} has no variant of its difficulty for seed {seed}; use larger or more numbers in the file"
    )


def _unused(
    draws: list[ProblemValues], column: int, problem_with: Callable[[ProblemValues], Problem | None]
) -> Problem | None:
    """Return a problem for a seed without suitable draws, from the draws that no other seed of its row uses.

    Args:
        draws: All distinct draws of the row.
        column: Index of the seed in its row.
        problem_with: Returns the problem of a draw, or None if the draw is unsuitable.
    """
    unused: list[ProblemValues] = []
    n_served_before = 0
    for other in range(_SEEDS_PER_ROW):
        candidates = iter(draws[other::_SEEDS_PER_ROW])
        if not any(map(problem_with, candidates)) and other < column:
            n_served_before += 1
        unused.extend(candidates)  # those after its first suitable one
    return next(islice(filter(None, map(problem_with, unused)), n_served_before, None), None)


def _problem(name: str, values: ProblemValues, source_text: str) -> Problem:
    """Return a problem with these values, without comparisons: they apply only to the original numbers."""
    values = {key: value for key, value in values.items() if key not in ("document", "mistake")}
    return Problem(name, toml_document(values | {"source": source_text}))


def _draws(source: ProblemSource, name: str, row: int) -> Iterator[ProblemValues]:
    """Yield distinct values for the file, all different from the original."""
    vary = PROBLEM_TYPES[source.choice("kind", PROBLEM_TYPES)].vary
    previous = {repr(source.values)}
    for number in range(_LONGEST_ROW):
        values = source.values | vary(source, RandomValues(f"{name} {row} {number}"))
        if repr(values) not in previous:
            previous.add(repr(values))
            yield values


def _is_comparable(worksheet: Worksheet, original: Worksheet) -> bool:
    """Return whether a worksheet has the same steps, none of them more trivial, and is not much longer."""
    if [step.key for step in worksheet.steps] != [step.key for step in original.steps]:
        return False
    if [step.grid for step in worksheet.steps] == [step.grid for step in original.steps]:
        return False  # the same numbers in another notation
    cells = [sum(len(step.grid.numbers) for step in of.steps if not step.is_given) for of in (worksheet, original)]
    if not cells[1] / _CELLS_RATIO <= cells[0] <= cells[1] * _CELLS_RATIO:
        return False
    for new, old in zip(worksheet.steps, original.steps, strict=True):
        if _is_dull(new) > _is_dull(old) or _has_more_ties(new, old):
            return False
    length, expected = (
        sum(len(bounded_text(x)) for step in of.steps for x in step.grid.numbers) for of in (worksheet, original)
    )
    return length <= 1.5 * expected + 100


def _is_dull(step: WorksheetStep) -> bool:
    """Return whether all numbers of a step are equal, or most of them are zero."""
    numbers = step.grid.numbers
    zeros = sum(x == 0 for x in numbers)
    return len(numbers) > 1 and (len(set(numbers)) == 1 or 4 * zeros > 3 * len(numbers))


def _has_more_ties(new: WorksheetStep, old: WorksheetStep) -> bool:
    """Return whether a row of attention weights is shared by more different words than in the original."""
    if not new.key.startswith("weights") or len(new.grid.cells) != len(old.grid.cells):
        return False
    return any(now > before for now, before in zip(_attended_words(new), _attended_words(old), strict=True))


def _attended_words(step: WorksheetStep) -> list[int]:
    """Return how many different words each row of attention weights attends to; columns are named "3 A"."""
    words = [name.split()[-1] if name else name for name in step.grid.columns]
    return [len({word for word, p in zip(words, row, strict=True) if p != 0}) for row in step.grid.cells]
