"""The five course documents, question by question, with the commands that answer them.

The documents themselves are not included; the TOML files of this package paraphrase their questions.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from clearhead.errors import ConfigError


@dataclass(frozen=True)
class DocumentAnswer:
    """A command (without the word clearhead) that answers a question, and a description of its output."""

    command: str
    description: str

    @property
    def kind(self) -> str:
        """ "exercise", "starter", "claim", "page" or "command"."""
        if self.command.startswith("exercise "):
            return "starter" if self.command.startswith("exercise starter ") else "exercise"
        return "claim" if self.command.startswith("claims show ") else "page" if "--html" in self.command else "command"


@dataclass(frozen=True)
class DocumentQuestion:
    """A paraphrased question of a document.

    Attributes:
        location: Number of the question in the document.
        text: The question.
        answers: Commands that answer it.
        points: Points in the document; 0 if it gives none.
        steps: Steps of its exercise that an exam asks for; empty means all.
    """

    location: str
    text: str
    answers: tuple[DocumentAnswer, ...]
    points: int = 0
    steps: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the question as a part of the document's JSON."""
        answers = [
            {"kind": a.kind, "command": f"clearhead {a.command}", "description": a.description} for a in self.answers
        ]
        return {"location": self.location, "text": self.text, "points": self.points or None, "answers": answers}


@dataclass(frozen=True)
class CourseDocument:
    """A course document: an exam, a homework or an exercise sheet."""

    number: str
    name: str
    description: str
    questions: tuple[DocumentQuestion, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the document printed by `clearhead course show NUMBER --json`."""
        questions = [question.to_dict() for question in self.questions]
        return {"number": self.number, "name": self.name, "description": self.description, "questions": questions}


def documents() -> dict[str, CourseDocument]:
    """Return the five course documents by number, from 000 to 004."""
    by_number = {}
    for entry in sorted(resources.files("clearhead.course.sources").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            values = tomllib.loads(entry.read_text(encoding="utf-8"))
            number = entry.name.removesuffix(".toml")
            for question in values["question"]:
                question["answers"] = tuple(DocumentAnswer(*answer) for answer in question["answers"])
                question["steps"] = tuple(question.get("steps", ()))
            questions = tuple(DocumentQuestion(**question) for question in values["question"])
            by_number[number] = CourseDocument(number, values["name"], values["description"], questions)
    return by_number


def document(number: str) -> CourseDocument:
    """Return a course document by its number.

    Args:
        number: Number of the document, such as "000".

    Returns:
        The document with its questions.

    Raises:
        ConfigError: If there is no such document.

    Example:
        >>> document("000").questions[0].location
        'Q1a'
    """
    known_documents = documents()
    if number not in known_documents:
        raise ConfigError(f"no course document {number!r}; expected one of {', '.join(known_documents)}")
    return known_documents[number]
