from pathlib import Path
from clearhead import work


worksheet = work.solve("attention-by-hand")  # a Worksheet of WorksheetStep with an ExactGrid, NumericCheck, DocumentComparison
worksheet.agrees  # → True

work.solve(work.variant("attention-by-hand", seed=7)).agrees  # → True

problem = work.read("attention-by-hand")  # a Problem
work.solve_text(problem.text).title == work.solve("attention-by-hand").title  # → True

grades = work.grade_text(work.solve("attention-by-hand"), "")  # a Grades
grades.credit  # → 0

answers = Path("anna.toml")
size = answers.write_text("")
student = work.grade_file(work.solve("attention-by-hand"), answers)
class_grades = work.grade_class(work.solve("attention-by-hand"), work.answer_files([answers]))  # a ClassGrades

"sort-dedup" in work.bundled_problems()  # → True

work.ProblemError  # names the line of the error in a problem file
