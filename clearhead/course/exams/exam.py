"""Exams: questions with parts and points, made from a course document or read from a file.

title = "Attention, first test"
[[question]]
sheet = "sort-dedup"            # a bundled exercise, or a .toml file in the same folder
points = 8
steps = ["weights", "loss"]     # steps to ask for; default: all
[[question]]
title = "Positions"
[[question.part]]
text = "Why does attention need positions?"
points = 4
answer = "text"                 # or "proof", "calculation", "drawing", "code"
solution = "Attention is permutation-equivariant."
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path

from clearhead.course.answers.model_answer import DEFAULT_TOTAL, Mark, model_answer
from clearhead.course.exercises import Worksheet, WorksheetStep, solve
from clearhead.course.exercises.problem import read_text
from clearhead.course.exercises.source import ProblemSource
from clearhead.course.sources import DocumentQuestion, document

ANSWERS = ("text", "proof", "calculation", "drawing", "code")
_MOST_OPTIONS = 8
_QUESTION_KEYS = ("location", "title", "text", "exercise", "sheet", "given", "program", "points", "steps", "part")
_PART_KEYS = (
    "text", "points", "marks", "variant_marks", "steps", "results", "rows", "row_numbers", "choices", "correct",
    "answer", "size", "solution",
)  # fmt: skip


@dataclass(frozen=True)
class ExamPart:
    """A part of a question, and the way it is answered.

    Attributes:
        text: The question.
        points: Points; 0 if the parts of the question have no points of their own.
        steps: Steps of the exercise whose results are entered in tables; empty for an answer in words.
        results: Steps that the booklet of a variant shows because the answer of this part contains them.
        marks: Lines of the mark scheme of the model answer that this part is marked by, counted from 1.
        variant_marks: The same lines for variants, if those of the model answer name its numbers.
        rows: Rows of these tables that are asked; empty means all.
        row_numbers: The same by their numbers, from 1, for rows whose names depend on the variant.
        choices: Options of a multiple-choice question.
        correct: Number of the correct option, from 1.
        answer: "text", "proof", "calculation", "drawing" or "code".
        size: Height of the space for the answer in millimeters; 0 derives it from the points.
        solution: Answer in words, for questions that are not in a course document.
    """

    text: str
    points: int = 0
    steps: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    marks: tuple[int, ...] = ()
    variant_marks: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    row_numbers: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    correct: int = 0
    answer: str = "text"
    size: int = 0
    solution: str = ""


@dataclass(frozen=True)
class ExamQuestion:
    """A question of an exam.

    Attributes:
        title: Heading.
        text: Words before the parts.
        parts: Its parts.
        points: Points of all parts together.
        exercise: Name or path of the exercise with its numbers; empty if it has none.
        data: Data of the exercise to print, by key of a step; None prints all.
        program: "network" prints the layers of the exercise as a program.
        slug: Course document with its model answer; empty if there is none.
        location: Number of the question in that document.
    """

    title: str
    text: str
    parts: tuple[ExamPart, ...]
    points: int = 0
    exercise: str = ""
    data: tuple[str, ...] | None = None
    program: str = ""
    slug: str = ""
    location: str = ""


@dataclass(frozen=True)
class Exam:
    """An exam.

    Attributes:
        title: Title.
        questions: Its questions in order.
        about: A note about its origin.
    """

    title: str
    questions: tuple[ExamQuestion, ...]
    about: str = ""

    @property
    def points(self) -> int:
        """Points of all questions."""
        return sum(question.points for question in self.questions)


def exam_from_document(slug: str) -> Exam:
    """Return an exam of all questions of a course document, with its points.

    Args:
        slug: Name of the document, such as "ceng403-exam".

    Returns:
        The exam. If the document gives no points, each question has 10.

    Raises:
        ConfigError: If the document does not exist.

    Example:
        >>> exam_from_document("ceng403-exam").points
        150
    """
    originals = {question.location: question for question in document(slug).questions}
    path = resources.files("clearhead.course.exams") / "papers" / f"{slug}.toml"
    source = ProblemSource.parse(path.read_text(encoding="utf-8"), f"{slug}.toml")
    questions = [_question(block, None, slug, originals) for block in source.tables("question")]
    for location in originals.keys() - {question.location for question in questions}:
        source.fail("question", f"the question {location} is missing; add a [[question]] with this location")
    about = f"After {document(slug).name.removesuffix(', with solutions')}."
    if not any(question.points for question in originals.values()):
        about += " The document gives no points; those printed here are ours."
    return Exam(source.text("title"), tuple(questions), about)


def read_exam(path: Path) -> Exam:
    """Read an exam file; problem files are relative to its folder.

    Args:
        path: The TOML file; the module's description shows its keys.

    Returns:
        The exam.

    Raises:
        ProblemError: If the file is invalid; the message names the line.
        StorageError: If the file cannot be read.
    """
    source = ProblemSource.parse(read_text(path), path.name)
    source.allow_keys("title", "about", "question")
    source.require_keys("title", "question")
    questions = [_question(block, path.parent, "", {}) for block in source.tables("question")]
    return Exam(source.text("title"), tuple(questions), source.text("about"))


def _question(
    block: ProblemSource, folder: Path | None, slug: str, originals: dict[str, DocumentQuestion]
) -> ExamQuestion:
    block.allow_keys(*_QUESTION_KEYS)
    location, exercise = block.text("location"), block.text("exercise") or block.text("sheet")
    if slug and location not in originals:
        block.fail("location", f"the document has no question {location!r}; expected one of {', '.join(originals)}")
    if folder is not None and exercise.endswith(".toml"):
        exercise = str(folder / exercise)
    if not exercise and "part" not in block.values:
        block.fail(None, "the key 'sheet' is missing; add sheet = … or at least one [[question.part]]")
    worksheet = solve(exercise) if exercise else None
    scheme = model_answer(slug, location).marks if slug else ()
    if "part" in block.values:
        parts = _parts(block, worksheet, scheme)
    else:
        assert worksheet is not None
        parts = _parts_of_steps(block, worksheet)
    points = block.integer("points", 0, least=0, most=1000) or sum(part.points for part in parts)
    expected = (originals[location].points or DEFAULT_TOTAL) if slug else points
    if any(part.points for part in parts) and sum(part.points for part in parts) != expected:
        block.fail(None, f"the parts have {sum(part.points for part in parts)} points; expected {expected}")
    data = tuple(block.names("given")) if "given" in block.values else None
    _check_keys(block, "given", data or (), [step for step in worksheet.steps if step.is_given] if worksheet else [])
    return ExamQuestion(
        title=block.text("title", worksheet.title if worksheet else ""),
        text=block.text("text", worksheet.question if worksheet and "part" not in block.values else ""),
        parts=parts,
        points=expected,
        exercise=exercise,
        data=data,
        program=block.choice("program", ("", "network"), ""),
        slug=slug,
        location=location,
    )


def _parts(block: ProblemSource, worksheet: Worksheet | None, scheme: tuple[Mark, ...]) -> tuple[ExamPart, ...]:
    """Return the parts of a question; a line of its mark scheme belongs to one part at most."""
    sources = block.tables("part")
    parts = tuple(_part(source, worksheet, scheme, is_only=len(sources) == 1) for source in sources)
    used = [number for part in parts for number in part.marks]
    if len(set(used)) < len(used):
        block.fail(None, f"the parts have the marks {used}; expected each line of the mark scheme in one part")
    return parts


def _part(block: ProblemSource, worksheet: Worksheet | None, scheme: tuple[Mark, ...], *, is_only: bool) -> ExamPart:
    block.allow_keys(*_PART_KEYS)
    block.require_keys("text")
    choices = tuple(block.names("choices"))
    steps, results = (_steps(block, key, worksheet) for key in ("steps", "results"))
    rows = tuple(block.names("rows"))
    if worksheet:
        labels = {label for key in steps for label in worksheet.step(key).grid.rows}
        for i, row in enumerate(rows):
            if row not in labels:
                block.fail(("rows", i), f"unknown row {row!r}; expected one of {', '.join(sorted(labels))}")
    if choices and not 2 <= len(choices) <= _MOST_OPTIONS:
        block.fail("choices", f"there are {len(choices)} choices; expected 2 to {_MOST_OPTIONS}")
    marks, variant_marks = _marks(block, scheme, is_only=is_only and not steps), tuple(block.names("variant_marks"))
    if variant_marks and len(variant_marks) != len(marks):
        block.fail("variant_marks", f"there are {len(variant_marks)} lines; expected {len(marks)}, one for each mark")
    return ExamPart(
        text=block.text("text"),
        points=block.integer("points", 0, least=0, most=1000) or _sum_points(block, scheme, marks),
        steps=steps,
        results=results,
        marks=marks,
        variant_marks=variant_marks,
        rows=rows,
        row_numbers=tuple(block.integers("row_numbers", 1000)) if "row_numbers" in block.values else (),
        choices=choices,
        correct=block.integer("correct", least=1, most=len(choices)) if choices else 0,
        answer=block.choice("answer", ANSWERS, "text"),
        size=block.integer("size", 0, least=0, most=230),
        solution=block.text("solution"),
    )


def _steps(block: ProblemSource, key: str, worksheet: Worksheet | None) -> tuple[str, ...]:
    """Return names of steps that the exercise of a question asks for."""
    names = tuple(block.names(key))
    if names and worksheet is None:
        block.fail(key, f"{key} need an exercise; add exercise = … to the question")
    if names and worksheet:
        _check_keys(block, key, names, [step for step in worksheet.steps if not step.is_given])
    return names


def _marks(block: ProblemSource, scheme: tuple[Mark, ...], *, is_only: bool) -> tuple[int, ...]:
    """Return the numbers of the lines of a mark scheme that belong to a part: all if it is the only one."""
    if "marks" not in block.values:
        return tuple(range(1, len(scheme) + 1)) if is_only else ()
    numbers = block.integers("marks", len(scheme))
    if 0 in numbers:
        block.fail("marks", "marks holds 0; expected numbers of lines of the mark scheme, from 1")
    return tuple(numbers)


def _sum_points(block: ProblemSource, scheme: tuple[Mark, ...], numbers: tuple[int, ...]) -> int:
    total = sum((scheme[number - 1].points for number in numbers), Fraction(0))
    if total.denominator != 1:
        block.fail("marks", f"the marks have {total} points; expected a whole number")
    return int(total)


def _check_keys(block: ProblemSource, key: str, names: tuple[str, ...], steps: list[WorksheetStep]) -> None:
    keys = sorted(step.key for step in steps)
    for i, name in enumerate(names):
        if name not in keys:
            exercise = block.text("sheet") or block.text("exercise") or "the exercise"
            block.fail((key, i), f"{exercise} has no step {name!r}; expected one of {', '.join(keys)}")


def _parts_of_steps(block: ProblemSource, worksheet: Worksheet) -> tuple[ExamPart, ...]:
    """Return a part per step of an exercise, with the points shared by how much each step asks for."""
    questions = [step for step in worksheet.steps if not step.is_given]
    selected = tuple(block.names("steps"))
    _check_keys(block, "steps", selected, questions)
    steps = [step for step in questions if not selected or step.key in selected]
    points = share_points(block.integer("points", 0, least=0, most=1000), [len(step.grid.numbers) for step in steps])
    return tuple(ExamPart(step.title, n, (step.key,)) for step, n in zip(steps, points, strict=True))


def share_points(points: int, cells: list[int]) -> list[int]:
    """Return the points of each step: at least one, and more for larger tables, but not in proportion to their cells.

    If there are fewer points than steps, no step has points of its own.

    Example:
        >>> share_points(10, [1, 256, 16]), share_points(2, [1, 1, 1])
        ([1, 6, 3], [0, 0, 0])
    """
    if points < len(cells):
        return [0] * len(cells)
    weights = [1 + math.log2(max(1, n)) for n in cells]
    free = points - len(cells)
    shares = [free * weight / sum(weights) for weight in weights]
    result = [1 + int(share) for share in shares]
    by_remainder = sorted(range(len(cells)), key=lambda i: (int(shares[i]) - shares[i], i))
    for i in by_remainder[: points - sum(result)]:
        result[i] += 1
    return result
