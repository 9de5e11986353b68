"""Check variants of all exercises: solved, checked in float64, graded against themselves, and distinct.

python -m tools.variants                 seeds 0 to 99 of every bundled exercise (`make variants`)
python -m tools.variants sort-dedup 7    seeds 0 to 6 of one
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from clearhead.course.exercises import Worksheet, bundled_problems, grade_text, solve, variant
from clearhead.course.exercises.grading_rules import numeric_columns
from clearhead.course.exercises.numbers import decimal, text

LONGEST = 300
PLACES = 12


def answers(worksheet: Worksheet) -> str:
    """Return an answer file with every cell of every question: exact if short, else rounded to twelve places."""

    lines = []
    for step in worksheet.steps:
        if not step.is_given:
            rows = [[_written(x) for x in row] for row in numeric_columns(step).cells]
            lines.append(f"{step.key} = {json.dumps(rows, ensure_ascii=False)}\n")
    return "".join(lines)


def _written(x: Any) -> str:
    if isinstance(x, str):
        return x
    if not x.is_Rational and (x.is_Float or _parts(x) > LONGEST):
        return decimal(x, PLACES)
    exact = text(x)
    return exact if len(exact) <= LONGEST else decimal(x, PLACES)


def _parts(x: Any) -> int:
    """Return the number of nodes of an expression, counted up to LONGEST."""
    number, waiting = 0, [x]
    while waiting and number <= LONGEST:
        number += 1
        waiting += waiting.pop().args
    return number


def content(worksheet: Worksheet) -> str:
    """Return the content of a worksheet without its name."""
    return repr([(step.key, step.grid.rows, step.grid.cells) for step in worksheet.steps])


def faults(name: str, seeds: range) -> list[str]:
    """Return the faults of these variants of an exercise, one sentence each."""
    messages: list[str] = []
    source_by_content = {content(solve(name)): "the original"}
    for seed in seeds:
        worksheet = solve(variant(name, seed))
        if not worksheet.agrees:
            messages.append(f"seed {seed}: " + "; ".join(check.sentence for check in worksheet.checks))
        grades = grade_text(worksheet, answers(worksheet))
        if not grades.is_right or grades.unanswered:
            messages.append(f"seed {seed}: not all of its answers are right: {grades}")
        first_source = source_by_content.setdefault(content(worksheet), f"seed {seed}")
        if first_source != f"seed {seed}":
            messages.append(f"seed {seed}: the same sheet as {first_source}")
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sheet", nargs="?")
    parser.add_argument("seeds", nargs="?", type=int, default=100)
    options = parser.parse_args()
    n_faults = 0
    for name in [options.sheet] if options.sheet else bundled_problems():
        start = time.monotonic()
        messages = faults(name, range(options.seeds))
        n_faults += len(messages)
        seconds = time.monotonic() - start
        print(
            f"{name}: {options.seeds} variants, {len(messages)} faults, {seconds:.0f} s",
            *messages,
            sep="\n  ",
            flush=True,
        )
    return min(n_faults, 1)


if __name__ == "__main__":
    sys.exit(main())
