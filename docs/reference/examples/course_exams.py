from pathlib import Path

from clearhead.course import exams


exam = exams.exam_from_document("deep-learning-final")  # an Exam
len(exam.questions), exam.points  # → (20, 100)

part = exams.ExamPart("Why does attention need positions?", points=4)
question = exams.ExamQuestion("Positions", "", (part,), points=4)
small = exams.Exam("A test", (question,))
[path.name for path in exams.write_exam(small, Path("test.md"))]  # → ['test.md', 'test-solutions.md']
".pdf" in exams.FORMATS  # → True

file = Path("mine.toml")
file.write_text('title = "Mine"\n[[question]]\nsheet = "convolution-128"\npoints = 4\n')  # → 65
exams.read_exam(file).points  # → 4
