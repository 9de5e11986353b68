from pathlib import Path
from clearhead.course import exercises


worksheet = exercises.solve("attention-by-hand")  # a Worksheet of WorksheetStep with an ExactGrid, NumericCheck, DocumentComparison
worksheet.agrees  # → True

exercises.solve(exercises.variant("attention-by-hand", seed=7)).agrees  # → True

problem = exercises.read("attention-by-hand")  # a Problem
exercises.solve_text(problem.text).title == exercises.solve("attention-by-hand").title  # → True

grades = exercises.grade_text(exercises.solve("attention-by-hand"), "")  # a Grades
grades.credit  # → 0

answers = Path("anna.toml")
size = answers.write_text("")
student = exercises.grade_file(exercises.solve("attention-by-hand"), answers)
class_grades = exercises.grade_class(exercises.solve("attention-by-hand"), exercises.answer_files([answers]))  # a ClassGrades

"sort-dedup" in exercises.bundled_problems()  # → True

exercises.ProblemError  # names the line of the error in a problem file
