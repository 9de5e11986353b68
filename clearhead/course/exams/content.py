"""The content of a question paper: its questions with the data and the answer fields of one variant."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from string import ascii_lowercase, ascii_uppercase

from clearhead.course.exams.exam import Exam, ExamPart, ExamQuestion
from clearhead.course.exercises import Worksheet, WorksheetStep, solve, variant
from clearhead.course.exercises.problem import fill_text
from clearhead.course.exercises.sheet import ExactGrid
from clearhead.course.exercises.source import ProblemValues

RULES = (
    "Write your answers in the spaces below the questions, and show how you arrived at them.",
    "Give exact numbers (fractions, roots, powers of e) or decimals with at least three places.",
    "A result that follows correctly from an earlier wrong one gets full points.",
)
_LINE = 8  # height of a line to write on, in millimeters
# Millimeters of space per point, by kind of answer.
_PER_POINT = {"text": 13, "proof": 17, "calculation": 17, "drawing": 14, "code": 11}
_LEAST, _MOST = 24, 200


@dataclass(frozen=True)
class PaperPart:
    """A part of a question on paper.

    Attributes:
        label: Its letter, or "" if the question has only one part.
        part: The part of the exam.
        fields: Steps whose results are entered.
        options: Letters and texts of a multiple-choice question, in the order of this variant.
        correct: Letter of the correct option.
        size: Height of the space for the answer in millimeters.
    """

    label: str
    part: ExamPart
    fields: tuple[WorksheetStep, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    correct: str = ""
    size: int = 0

    @property
    def n_entries(self) -> int:
        """Number of results that are entered in the tables."""
        return sum(len(step.grid.numbers) for step in self.fields)

    @property
    def space_label(self) -> str:
        """The word in the space for the answer, such as "Proof"; "" for lines to write on."""
        kind = self.part.answer
        if kind == "proof" and "rove" not in self.part.text:
            return "Derivation"
        return "" if kind == "text" else "Program" if kind == "code" else kind.capitalize()


@dataclass(frozen=True)
class PaperQuestion:
    """A question on paper.

    Attributes:
        number: Its number in the exam.
        question: The question.
        text: Words before the parts, with the numbers of this variant.
        parts: Its parts.
        data: Data of the exercise that are printed.
        program: Program that is printed.
        worksheet: The solved exercise of this variant, or None.
    """

    number: int
    question: ExamQuestion
    text: str
    parts: tuple[PaperPart, ...]
    data: tuple[WorksheetStep, ...] = ()
    program: str = ""
    worksheet: Worksheet | None = None


@dataclass(frozen=True)
class Paper:
    """One variant of an exam.

    Attributes:
        exam: The exam.
        questions: Its questions with the numbers of this variant.
        variant: Letter of the variant, or "".
        seed: Seed of its numbers; None for those of the exercises.
    """

    exam: Exam
    questions: tuple[PaperQuestion, ...]
    variant: str = ""
    seed: int | None = None
    rules: tuple[str, ...] = field(default=RULES)

    @property
    def title(self) -> str:
        """Title with the variant."""
        return self.exam.title + (f", variant {self.variant}" if self.variant else "")


def paper(exam: Exam, variant_name: str = "", seed: int | None = None) -> Paper:
    """Return one variant of an exam.

    Args:
        exam: The exam.
        variant_name: Letter of the variant, or "".
        seed: Seed of the numbers and of the order of options; None keeps those of the exercises.

    Returns:
        The paper with all its numbers.
    """
    questions = tuple(_question(i, question, seed) for i, question in enumerate(exam.questions, 1))
    return Paper(exam, questions, variant_name, seed)


def _question(number: int, question: ExamQuestion, seed: int | None) -> PaperQuestion:
    worksheet = None
    if question.exercise:
        worksheet = solve(question.exercise if seed is None else variant(question.exercise, seed))
    labels = ascii_lowercase if len(question.parts) > 1 else [""] * len(question.parts)
    parts = tuple(
        _part(label, part, worksheet, random.Random(f"{number} {label} {seed}") if seed is not None else None)
        for label, part in zip(labels, question.parts, strict=False)
    )
    steps = worksheet.steps if worksheet else ()
    data = tuple(step for step in steps if step.is_given and (question.data is None or step.key in question.data))
    text = " ".join(question.text.split())
    return PaperQuestion(
        number,
        question,
        fill_text(text, worksheet) if worksheet else text,
        parts,
        data,
        network_program(worksheet) if worksheet and question.program else "",
        worksheet,
    )


def _part(label: str, part: ExamPart, worksheet: Worksheet | None, rng: random.Random | None) -> PaperPart:
    if part.choices:
        order = list(range(len(part.choices)))
        if rng is not None:
            rng.shuffle(order)
        options = tuple((ascii_uppercase[i], part.choices[k]) for i, k in enumerate(order))
        return PaperPart(label, part, options=options, correct=ascii_uppercase[order.index(part.correct - 1)])
    if part.steps and worksheet:
        fields = tuple(select_rows(worksheet.step(key), part) for key in part.steps)
        return PaperPart(label, part, fields=fields)
    size = part.size or max(_LEAST, min(_MOST, part.points * _PER_POINT[part.answer]))
    return PaperPart(label, part, size=size)


def select_rows(step: WorksheetStep, part: ExamPart) -> WorksheetStep:
    """Return a step with the rows of its table that a part asks for; all rows if it names none."""
    if not part.rows and not part.row_numbers:
        return step
    indices = [i for i, name in enumerate(step.grid.rows) if name in part.rows or i + 1 in part.row_numbers]
    grid = ExactGrid.of(
        [step.grid.cells[i] for i in indices], [step.grid.rows[i] for i in indices], list(step.grid.columns)
    )
    return replace(step, grid=grid)


def network_program(worksheet: Worksheet) -> str:
    """Return the layers of a convolution exercise as a PyTorch program whose linear layer has a wrong input width."""
    problem: ProblemValues = worksheet.problem
    channels, lines, right = problem["input"][0], [], 0
    for layer, shape in zip(problem["layer"], worksheet.step("shapes").grid.cells[1:], strict=True):
        padding = layer.get("padding", 0)
        if layer["type"] == "convolution":
            size = f"in_channels={channels}, out_channels={layer['filters']}, kernel_size={layer['kernel']}"
            lines.append(f"nn.Conv2d({size}, stride={layer.get('stride', 1)}, padding={padding}),")
            channels = layer["filters"]
        elif layer["type"] == "flatten":
            right = int(shape[0])
            lines.append("nn.Flatten(),")
        elif layer["type"] == "linear":
            wrong = 8 * (channels - 1)
            lines.append(f"nn.Linear({wrong + (wrong == right)}, {layer['outputs']}),")
        else:
            name = "AvgPool2d" if layer["type"] == "average-pool" else "MaxPool2d"
            size = f"kernel_size={layer['kernel']}, stride={layer['stride']}, padding={padding}"
            lines += [f"nn.{name}({size}),", "nn.ReLU(),"]
    return "\n".join(["nn.Sequential(", *[f"    {line}" for line in lines], ")"])


def n_lines(size: int) -> int:
    """Return the number of lines to write on in a space."""
    return max(2, size // _LINE)
