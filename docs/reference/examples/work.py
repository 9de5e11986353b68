from pathlib import Path
from clearhead import work


solved = work.solve("attention-by-hand")  # a Work, of Step with a Grid each; Check and Comparison say what agrees
solved.agrees  # → True

work.solve(work.variant("attention-by-hand", seed=7)).agrees  # → True

problem = work.load("attention-by-hand")  # a Problem
work.solve_text(problem.text).title == work.solve("attention-by-hand").title  # → True

marks = work.mark_text(work.solve("attention-by-hand"), "")  # a Marks
marks.credit  # → 0

answers = Path("anna.toml")
size = answers.write_text("")
one = work.mark(work.solve("attention-by-hand"), answers)
everyone = work.mark_class(work.solve("attention-by-hand"), work.answer_files([answers]))  # a ClassMarks

"sort-dedup" in work.shipped()  # → True

work.ProblemError  # says in which line a problem file is wrong
