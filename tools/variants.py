"""Every variant of every sheet: made, worked, checked in float64, marked against itself, and unlike all others.

python -m tools.variants                 seeds 0 to 99 of every shipped sheet (`make variants`)
python -m tools.variants sort-dedup 7    seeds 0 to 6 of one
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from clearhead.work import Worksheet, bundled_problems, grade_text, solve, variant
from clearhead.work.grading import numeric_columns
from clearhead.work.numbers import decimal, text

LONGEST = 300
PLACES = 12


def answers(work: Worksheet) -> str:
    """An answer file with every cell of every question: exact where that is short, else rounded to twelve places."""

    lines = []
    for step in work.steps:
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
    """How many parts an expression has, counted no further than matters."""
    number, waiting = 0, [x]
    while waiting and number <= LONGEST:
        number += 1
        waiting += waiting.pop().args
    return number


def content(work: Worksheet) -> str:
    """What a student sees of a sheet, without its name."""
    return repr([(step.key, step.grid.rows, step.grid.cells) for step in work.steps])


def faults(name: str, seeds: range) -> list[str]:
    """What is wrong with these variants of a sheet, one sentence each."""
    found: list[str] = []
    seen = {content(solve(name)): "the original"}
    for seed in seeds:
        work = solve(variant(name, seed))
        if not work.agrees:
            found.append(f"seed {seed}: " + "; ".join(check.sentence for check in work.checks))
        marks = grade_text(work, answers(work))
        if not marks.is_right or marks.unanswered:
            found.append(f"seed {seed}: its own answers are not all right: {marks}")
        is_equal = seen.setdefault(content(work), f"seed {seed}")
        if is_equal != f"seed {seed}":
            found.append(f"seed {seed}: the same sheet as {is_equal}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sheet", nargs="?")
    parser.add_argument("seeds", nargs="?", type=int, default=100)
    wanted = parser.parse_args()
    wrong = 0
    for name in [wanted.sheet] if wanted.sheet else bundled_problems():
        begun = time.monotonic()
        found = faults(name, range(wanted.seeds))
        wrong += len(found)
        spent = time.monotonic() - begun
        print(f"{name}: {wanted.seeds} variants, {len(found)} faults, {spent:.0f} s", *found, sep="\n  ", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
