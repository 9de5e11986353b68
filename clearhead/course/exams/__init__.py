"""Exams on paper: question papers of any kind of question, in variants, and booklets with answers and mark schemes.

An exam is made from a course document, or from a file of exercises and questions.
"""

from clearhead.course.exams.exam import Exam, ExamPart, ExamQuestion, exam_from_document, read_exam
from clearhead.course.exams.write import FORMATS, write_exam

__all__ = ["FORMATS", "Exam", "ExamPart", "ExamQuestion", "exam_from_document", "read_exam", "write_exam"]
