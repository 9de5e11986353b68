"""The model answers: marks add up, placeholders resolve, programs run, and every command that they name exists."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache

import pytest

from clearhead.course.answers.blocks import Program, walk
from clearhead.course.answers.booklet import Booklet, booklet
from clearhead.course.answers.model_answer import model_answer, model_answers
from clearhead.course.answers.render import html, markdown, terminal, to_dict, typst_source
from clearhead.course.claims import claims
from clearhead.course.exercises import bundled_problems
from clearhead.course.sources import documents

QUESTIONS = [(slug, question.location) for slug, entry in documents().items() for question in entry.questions]
_COMMAND = re.compile(r"`clearhead ([^`]+)`")
_NAMED = re.compile(r"(claims show|exercise solve) ([\w-]+)")


@cache
def answered(slug: str, location: str) -> Booklet:
    """Return the computed answer to one question."""
    return booklet(slug, location)


@pytest.mark.parametrize("slug", documents())
def test_document_answers_every_question(slug):
    assert [answer.question for answer in model_answers(slug)] == list(documents()[slug].questions)


@pytest.mark.parametrize(("slug", "location"), QUESTIONS)
def test_marks_add_up_to_total_of_question(slug, location):
    answer = model_answer(slug, location)
    assert sum(mark.points for mark in answer.marks) == answer.total
    # A multiple-choice question has one right option, which earns all of its points.
    assert len(answer.marks) > 1 or location.startswith("Part 1,")
    assert all(mark.points > 0 for mark in answer.marks)


@pytest.mark.parametrize(("slug", "location"), QUESTIONS)
def test_every_placeholder_resolves(slug, location):
    text = json.dumps(to_dict(answered(slug, location)))
    assert "{{" not in text


@pytest.mark.parametrize(("slug", "location"), QUESTIONS)
def test_programs_run(slug, location):
    namespace = {"__name__": "answer"}
    for block in walk(answered(slug, location).answers[0].blocks):
        if isinstance(block, Program) and block.is_executable:
            exec(compile(block.code, f"{slug} {location}", "exec"), namespace)


@pytest.mark.parametrize(("slug", "location"), QUESTIONS)
def test_commands_in_answers_exist(slug, location, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"claims show": set(claims()), "exercise solve": set(bundled_problems())}
    for command in _COMMAND.findall(model_answer(slug, location).text):
        if match := _NAMED.match(command):  # other tests run claims and exercises
            assert match[2] in names[match[1]], command
        elif "{{" not in command:
            result = cli(*shlex.split(command))
            assert result.code == 0, f"{command}: {result.err}"


@pytest.mark.parametrize("slug", sorted({slug for slug, _ in QUESTIONS}))
def test_answers_render_in_every_format(slug):
    for location in (location for document, location in QUESTIONS if document == slug):
        content = answered(slug, location)
        assert max(map(len, terminal(content, 100).splitlines())) < 400
        for render in (markdown, html, typst_source):
            assert "Mark scheme" in render(content)
