"""All output fits 80 columns, and remains complete at 40: no word is cut and no number is missing."""

from __future__ import annotations

import re

import pytest

from clearhead.cli.output import console

TABLES = [
    "exercise solve attention-by-hand",
    "exercise list",
    "cost tiny-encoder-decoder --tokens 16",
    "cost --d-model 512 --n-heads 8 --tokens 1000 --formulas",
    "check sort-dedup --only determinism",
    "claims show scale-key-weight",
    "claims run scale-key-weight",
    "models",
    "models en-es",
    "data",
    "course list",
]
PICTURES = ["mask causal()&(window(256,0)|every(64)) --n 5000 --plan --device cuda", "mask causal() -n 64"]


@pytest.fixture
def run_at_width(cli, monkeypatch):
    def run(width: int, command: str) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(console, "width", width)
        ran = cli(*command.split())
        assert ran.code == 0, ran.err
        return ran.out

    return run


def words(text: str) -> set[str]:
    """Return the words and numbers of a text, without punctuation and the lines of drawings."""
    return {word for word in re.split(r"[\s,;:()\[\]]+", text) if re.search(r"\w", word)}


@pytest.mark.parametrize("command", TABLES)
def test_tables_fit_80_columns_and_are_complete_at_40(run_at_width, command):
    wide, narrow = run_at_width(80, command), run_at_width(40, command)
    assert max(map(len, wide.splitlines())) <= 80
    # At 40 columns, only a line with a long number or identifier may be longer.
    too_long = [line for line in narrow.splitlines() if len(line) > 40]
    assert [line for line in too_long if len(max(line.split(), key=len, default="")) < 22] == []
    joined = "".join(narrow.split())  # a long word may continue on the next line
    assert {word for word in words(wide) - words(narrow) if word not in joined} == set()
    assert narrow.count("…") <= wide.count("…")


@pytest.mark.parametrize("command", PICTURES)
def test_drawings_fit_the_terminal(run_at_width, command):
    for width in (80, 40):
        output = run_at_width(width, command)
        assert max(map(len, output.splitlines())) <= width
        assert "causal()" in output
        assert output.count("causal() & (window(256, 0) | every(64))\n") <= 1, "the expression is printed once"


@pytest.mark.parametrize("command", ["inspect", "check", "cost", "exercise solve"])
def test_help_breaks_no_words(run_at_width, command):
    output = run_at_width(80, f"{command} --help")
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output
    assert "contributions" in output or command != "inspect"


def test_course_show_exceeds_the_width_only_in_commands(run_at_width):
    long = [line for line in run_at_width(80, "course show ceng403-exam").splitlines() if len(line) > 80]
    assert [line for line in long if not line.startswith("   clearhead ")] == []
