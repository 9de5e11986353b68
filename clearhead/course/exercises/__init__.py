"""Exercises with exact solutions: `print(exercises.solve("sort-dedup"))`.

A problem is a short TOML file. It is solved step by step with exact fractions, roots and exponentials, and checked in
float64 against the code that models use. The package also writes variants with new numbers and grades answers. It
needs sympy.
"""

from clearhead.course.exercises.grading import ClassGrades, Grades, grade_class, grade_file, grade_text
from clearhead.course.exercises.problem import Problem, bundled_problems, read, solve, solve_text
from clearhead.course.exercises.sheet import DocumentComparison, ExactGrid, NumericCheck, Worksheet, WorksheetStep
from clearhead.course.exercises.source import ProblemError
from clearhead.course.exercises.submissions import answer_files
from clearhead.course.exercises.variants import variant

__all__ = [
    "ClassGrades", "DocumentComparison", "ExactGrid", "Grades", "NumericCheck", "Problem", "ProblemError", "Worksheet",
    "WorksheetStep", "answer_files", "bundled_problems", "grade_class", "grade_file", "grade_text", "read", "solve",
    "solve_text", "variant",
]  # fmt: skip
