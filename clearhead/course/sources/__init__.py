"""The five course documents, question by question, with the commands that answer them.

The documents themselves are not included; the TOML files of this package paraphrase their questions.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

from clearhead.errors import ConfigError

__all__ = ["SLUGS", "CourseDocument", "DocumentAnswer", "DocumentQuestion", "document", "documents"]

# The documents' names on the command line, in the order of the course.
SLUGS = (
    "ceng403-exam",
    "ceng403-answered",
    "csci2572-homework",
    "transformer-exercises",
    "deep-learning-final",
)


@dataclass(frozen=True)
class DocumentAnswer:
    """A command (without the word clearhead) that answers a question, and a description of its output."""

    command: str
    description: str

    @property
    def kind(self) -> str:
        """Kind of the answer: "exercise", "starter", "proof", "claim", "page" or "command"."""
        kinds = {
            "exercise solve": "exercise",
            "exercise starter": "starter",
            "exercise proof": "proof",
            "claims show": "claim",
        }
        beginning = " ".join(self.command.split()[:2])
        return kinds.get(beginning, "page" if "--html" in self.command else "command")


@dataclass(frozen=True)
class DocumentQuestion:
    """A paraphrased question of a document.

    Attributes:
        location: Number of the question in the document.
        title: Topic of the question.
        text: The question, in our words.
        answers: Commands that answer it.
        points: Points in the document; 0 if it gives none.
        steps: Steps of its exercise that an exam asks for; empty means all.
    """

    location: str
    title: str
    text: str
    answers: tuple[DocumentAnswer, ...]
    points: int = 0
    steps: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the question as a part of the document's JSON."""
        answers = [
            {"kind": a.kind, "command": f"clearhead {a.command}", "description": a.description} for a in self.answers
        ]
        question = {"location": self.location, "title": self.title, "text": self.text}
        return question | {"points": self.points or None, "answers": answers}


@dataclass(frozen=True)
class CourseDocument:
    """A course document: an exam, a homework or an exercise sheet.

    Attributes:
        slug: Name on the command line, such as "ceng403-exam".
        name: Title of the document.
        description: Content of the document in one sentence.
        questions: Its questions, in order.
    """

    slug: str
    name: str
    description: str
    questions: tuple[DocumentQuestion, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the document printed by `clearhead course show NAME --json`."""
        questions = [question.to_dict() for question in self.questions]
        return {"slug": self.slug, "name": self.name, "description": self.description, "questions": questions}


def documents() -> dict[str, CourseDocument]:
    """Return the five course documents by slug, in the order of `SLUGS`."""
    return {slug: _read_document(slug) for slug in SLUGS}


def _read_document(slug: str) -> CourseDocument:
    """Read the TOML file of a course document."""
    path = resources.files("clearhead.course.sources") / f"{slug}.toml"
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    for question in values["question"]:
        question["answers"] = tuple(DocumentAnswer(*answer) for answer in question["answers"])
        question["steps"] = tuple(question.get("steps", ()))
    questions = tuple(DocumentQuestion(**question) for question in values["question"])
    return CourseDocument(slug, values["name"], values["description"], questions)


def document(slug: str) -> CourseDocument:
    """Return a course document by its slug.

    Args:
        slug: One of `SLUGS`, such as "ceng403-exam".

    Returns:
        The document with its questions.

    Raises:
        ConfigError: If the document does not exist.

    Example:
        >>> document("ceng403-exam").questions[0].location
        'Q1a'
    """
    if slug not in SLUGS:
        raise ConfigError(f"no course document {slug!r}; expected one of {', '.join(SLUGS)}")
    return _read_document(slug)
