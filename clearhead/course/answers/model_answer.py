"""Read model answers and their mark schemes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources

from clearhead._core.validation import lookup
from clearhead.course.sources import DocumentQuestion, document
from clearhead.errors import ConfigError

# The total of a mark scheme if the document gives no points.
DEFAULT_TOTAL = 10
_SCHEME = "\n## Mark scheme\n"
_MARK = re.compile(r"- (\d+(?:\.5)?): (.+)")


@dataclass(frozen=True)
class Mark:
    """One line of a mark scheme: the points, and what an answer must contain to earn them."""

    points: Fraction
    text: str


@dataclass(frozen=True)
class ModelAnswer:
    """The answer to a question, as it is stored.

    Attributes:
        slug: Name of the course document.
        question: The question.
        text: The answer in Markdown, with placeholders.
        marks: The mark scheme.
    """

    slug: str
    question: DocumentQuestion
    text: str
    marks: tuple[Mark, ...]

    @property
    def total(self) -> int:
        """The points of the question; `DEFAULT_TOTAL` if the document gives none."""
        return self.question.points or DEFAULT_TOTAL


def file_name(location: str) -> str:
    """Return the name of the file that answers a question.

    Example:
        >>> file_name("Part 2, Q1"), file_name("1(a)")
        ('Part-2-Q1.md', '1-a.md')
    """
    return re.sub(r"[^\w.]+", "-", location).strip("-") + ".md"


def model_answer(slug: str, location: str) -> ModelAnswer:
    """Return the answer to a question of a course document.

    Args:
        slug: Name of the document, such as "ceng403-exam".
        location: Number of the question, such as "Q1a"; spaces, case and punctuation do not matter.

    Returns:
        The answer with its mark scheme.

    Raises:
        ConfigError: If the document, question or answer does not exist.

    Example:
        >>> sum(mark.points for mark in model_answer("ceng403-exam", "Q1a").marks)
        Fraction(8, 1)
    """
    questions = {_normalize(question.location): question for question in document(slug).questions}
    if _normalize(location) not in questions:
        by_location = {question.location: question for question in questions.values()}
        lookup(location, by_location, f"{slug} has no question")
    return _read_answer(slug, questions[_normalize(location)])


def model_answers(slug: str) -> tuple[ModelAnswer, ...]:
    """Return the answers to all questions of a course document, in its order."""
    return tuple(_read_answer(slug, question) for question in document(slug).questions)


def has_answer(slug: str, location: str) -> bool:
    """Return whether a question has an answer."""
    return (_folder(slug) / file_name(location)).is_file()


def _folder(slug: str) -> resources.abc.Traversable:
    return resources.files("clearhead.course.answers") / slug


def _normalize(location: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", location.lower())


def _read_answer(slug: str, question: DocumentQuestion) -> ModelAnswer:
    path = _folder(slug) / file_name(question.location)
    if not path.is_file():
        raise ConfigError(f"{slug}, {question.location} has no model answer yet; expected the file {path.name}")
    return parse_answer(slug, question, path.read_text(encoding="utf-8"))


def parse_answer(slug: str, question: DocumentQuestion, content: str) -> ModelAnswer:
    """Split the file of an answer into the answer and its mark scheme; raise ConfigError if it is invalid."""
    name = f"{slug}/{file_name(question.location)}"
    text, separator, scheme = content.partition(_SCHEME)
    if not separator:
        raise ConfigError(f"{name} has no line '## Mark scheme'; add one and a list of marks below it")
    return ModelAnswer(slug, question, text.strip() + "\n", _read_marks(scheme, name))


def _read_marks(scheme: str, name: str) -> tuple[Mark, ...]:
    """Parse the list below the heading; indented lines continue the one above them."""
    joined = re.sub(r"\n[ ]+(?=\S)", " ", scheme.strip())
    marks = []
    for line in joined.splitlines():
        match = _MARK.fullmatch(line)
        if match is None:
            raise ConfigError(f"the mark scheme of {name} contains {line!r}; expected '- POINTS: TEXT'")
        marks.append(Mark(Fraction(match[1]), match[2]))
    return tuple(marks)
