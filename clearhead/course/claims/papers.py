"""Statements of the papers about themselves: numbers of questions, marks and points."""

from __future__ import annotations

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.registry import EXAM, FINAL, claim

# Points printed for each question and for its parts.
MARKS = ((20, (8, 12)), (18, (10, 8)), (25, (15, 10)), (22, (10, 8, 4)), (28, (12, 8, 8)), (20, (10, 10)), (17, (8, 9)))
POINTS = {
    "Part 1": (32, (4,) * 8),
    "Part 2": (18, (6,) * 3),
    "Part 3, Problem 1": (25, (5, 5, 10, 5)),
    "Part 3, Problem 2": (25, (5, 8, 5, 4, 3)),
}


@claim(
    EXAM,
    "Instructions",
    statement="The paper has seven questions, each with its marks.",
    method="Sums of the marks printed for the questions and for their parts.",
)
def marks_add_up(t: Experiment) -> None:
    t.assert_equal("questions", len(MARKS), 7)
    t.record_case("their parts", [sum(parts) for _, parts in MARKS], all(total == sum(parts) for total, parts in MARKS))


@claim(
    FINAL,
    "Instructions",
    statement="There are 20 questions and 100 points: 32, 18, 25 and 25.",
    method="Sums of the points printed for the parts and for their questions.",
)
def points_add_up(t: Experiment) -> None:
    t.assert_equal("questions", sum(len(parts) for _, parts in POINTS.values()), 20)
    for name, (total, parts) in POINTS.items():
        t.assert_equal(name, sum(parts), total)
    t.assert_equal("in all", sum(total for total, _ in POINTS.values()), 100)


@claim(
    FINAL,
    "Part 3, Problem 1, second heading",
    statement="Problem 1 has 5 points.",
    method="The points of its four questions, added up; the heading above it says 25.",
)
def points_of_problem_1(t: Experiment) -> None:
    total, parts = POINTS["Part 3, Problem 1"]
    t.record_case("its questions", " + ".join(map(str, parts)) + f" = {sum(parts)}, printed 5", sum(parts) == 5)
    t.intended("It has 25 points, as the heading above has it.", sum(parts) == total == 25)
