"""A booklet: the questions of a course document with their answers, ready to be rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from clearhead.course.answers.blocks import Block, Line, parse_blocks
from clearhead.course.answers.model_answer import ModelAnswer, model_answer, model_answers
from clearhead.course.answers.placeholders import Placeholders
from clearhead.course.sources import document

GRADING_NOTE = "Free text is not graded automatically: a person awards these marks."


@dataclass(frozen=True)
class ResolvedMark:
    """A line of a mark scheme whose placeholders are resolved."""

    points: Fraction
    line: Line


@dataclass(frozen=True)
class ResolvedAnswer:
    """An answer whose placeholders are resolved.

    Attributes:
        location: Number of the question.
        question: The question.
        blocks: The answer.
        marks: The mark scheme.
        total: Points of the question.
        uses_default_total: Whether the document gives no points, so that the total is ours.
        commands: Commands that show more, each with a description.
        title: Topic of the question.
        has_free_text: Whether an answer contains words or drawings, which are not graded automatically.
    """

    location: str
    question: str
    blocks: tuple[Block, ...]
    marks: tuple[ResolvedMark, ...]
    total: int
    uses_default_total: bool
    commands: tuple[tuple[str, str], ...]
    title: str = ""
    has_free_text: bool = True

    @property
    def scheme_note(self) -> str:
        """A sentence about the origin of the points and how they are awarded."""
        origin = "The document gives no points; these marks are ours." if self.uses_default_total else ""
        return " ".join(filter(None, (origin, GRADING_NOTE if self.has_free_text else "")))


@dataclass(frozen=True)
class Booklet:
    """Answers to questions of a course document.

    Attributes:
        slug: Name of the document on the command line.
        title: Title of the document.
        answers: The answers.
        is_whole: Whether it answers the whole document, rather than one question.
    """

    slug: str
    title: str
    answers: tuple[ResolvedAnswer, ...]
    is_whole: bool


def booklet(slug: str, location: str | None = None) -> Booklet:
    """Compute the answers to one question or to a whole document.

    Args:
        slug: Name of the document, such as "ceng403-exam".
        location: Number of a question, such as "Q1a"; None for the whole document.

    Returns:
        The answers with all placeholders resolved; render it with `clearhead.course.answers.render`.

    Raises:
        ConfigError: If the document, question or answer does not exist.

    Example:
        >>> booklet("ceng403-exam", "Q1a").answers[0].total
        8
    """
    stored = model_answers(slug) if location is None else (model_answer(slug, location),)
    return Booklet(slug, document(slug).name, _resolve(slug, stored), location is None)


def _resolve(slug: str, stored: Sequence[ModelAnswer]) -> tuple[ResolvedAnswer, ...]:
    resolver = Placeholders(slug)
    answers = []
    for answer in stored:
        question = answer.question
        marks = tuple(ResolvedMark(mark.points, _parse_line(mark.text, resolver)) for mark in answer.marks)
        commands = tuple(
            (f"clearhead {part.command.format(folder='.')}", part.description) for part in question.answers
        )
        answers.append(
            ResolvedAnswer(
                question.location,
                question.text,
                parse_blocks(answer.text, resolver),
                marks,
                answer.total,
                not question.points,
                commands,
                question.title,
            )
        )
    return tuple(answers)


def _parse_line(text: str, resolver: Placeholders) -> Line:
    (paragraph,) = parse_blocks(text, resolver)
    return getattr(paragraph, "line", ())
