"""The five documents that this project answers, question by question, each with the commands that answer it here.

The documents themselves are not part of it: the lists beside this file say in our own words what is asked."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from clearhead.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """A command (without the word clearhead), and what it shows."""

    command: str
    shows: str

    @property
    def kind(self) -> str:
        """sheet, program, claim, page or command."""
        if self.command.startswith("exercise "):
            return "program" if self.command.startswith("exercise starter ") else "sheet"
        return "claim" if self.command.startswith("claims show ") else "page" if "--html" in self.command else "command"


@dataclass(frozen=True)
class Question:
    """What is asked, where, for how many points (0 where the document gives none), and what answers it; `steps` are
    those of its sheet that an exam asks for, all of them where it names none."""

    place: str
    asks: str
    answers: tuple[Answer, ...]
    points: int = 0
    steps: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As a part of its document."""
        answers = [{"kind": a.kind, "command": f"clearhead {a.command}", "shows": a.shows} for a in self.answers]
        return {"place": self.place, "asks": self.asks, "points": self.points or None, "answers": answers}


@dataclass(frozen=True)
class Document:
    """One of the five."""

    number: str
    name: str
    about: str
    questions: tuple[Question, ...]

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead course show NUMBER --json` prints it."""
        questions = [question.to_dict() for question in self.questions]
        return {"number": self.number, "name": self.name, "about": self.about, "questions": questions}


def documents() -> dict[str, Document]:
    """The five documents by number, from 000 to 004."""
    found = {}
    for entry in sorted(resources.files("clearhead.documents").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            values = tomllib.loads(entry.read_text(encoding="utf-8"))
            number = entry.name.removesuffix(".toml")
            for question in values["question"]:
                question["answers"] = tuple(Answer(*answer) for answer in question["answers"])
                question["steps"] = tuple(question.get("steps", ()))
            questions = tuple(Question(**question) for question in values["question"])
            found[number] = Document(number, values["name"], values["about"], questions)
    return found


def document(number: str) -> Document:
    """One of them."""
    known = documents()
    if number not in known:
        raise ConfigError(f"there is no document {number!r}; there are {', '.join(known)}")
    return known[number]
