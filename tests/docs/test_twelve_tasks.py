"""The page of everyday tasks: its cells run, and each is as short as the shortest of the other libraries."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import execute, read_page

PAGE = read_page("guides/twelve-tasks.md")
TASKS = re.split(r"^## (\d+\. .+)$", PAGE.text, flags=re.MULTILINE)[1:]


def count_lines(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


@pytest.mark.parametrize(("title", "section"), list(zip(TASKS[::2], TASKS[1::2], strict=True)), ids=TASKS[::2])
def test_task_takes_no_more_lines_than_other_libraries(title, section):
    (cell,) = re.findall(r"^```\{code-cell\} python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    others = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert others, title
    assert count_lines(cell) <= min(map(count_lines, others)), title


def test_page_has_twelve_tasks_and_runs(capsys):
    assert len(TASKS) == 24
    names = execute(PAGE)
    assert names["p"].shape
