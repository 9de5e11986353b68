"""Every step of a small example, in exact numbers: `print(work.solve("sort-dedup"))`.

A problem is a short TOML file. Its steps are worked with fractions, roots and exponentials kept as such, and run once
more in float64 by the code that models use. This room needs sympy and is imported only when it is used."""

from clearhead.work.marks import ClassMarks, Marks, answer_files, mark, mark_class, mark_text
from clearhead.work.problem import Problem, load, shipped, solve, solve_text
from clearhead.work.sheet import Check, Comparison, Grid, Step, Work
from clearhead.work.source import ProblemError
from clearhead.work.variants import variant

__all__ = [
    "Check", "ClassMarks", "Comparison", "Grid", "Marks", "Problem", "ProblemError", "Step", "Work", "answer_files",
    "load", "mark", "mark_class", "mark_text", "shipped", "solve", "solve_text", "variant",
]  # fmt: skip
