"""Everything reads well in 80 columns, and in 40 nothing is lost: no word is cut, and no number left out."""

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
def at(cli, monkeypatch):
    def run(width: int, command: str) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(console, "_width", width)
        ran = cli(*command.split())
        assert ran.code == 0, ran.err
        return ran.out

    return run


def words(text: str) -> set[str]:
    """What can be read: words and numbers, without the signs around them and the lines of pictures."""
    return {word for word in re.split(r"[\s,;:()\[\]]+", text) if re.search(r"\w", word)}


@pytest.mark.parametrize("command", TABLES)
def test_tables_and_sheets(at, command):
    wide, narrow = at(80, command), at(40, command)
    assert max(map(len, wide.splitlines())) <= 80
    # In 40 columns a line may be longer only where one number or one identifier is.
    too_long = [line for line in narrow.splitlines() if len(line) > 40]
    assert [line for line in too_long if len(max(line.split(), key=len, default="")) < 22] == []
    together = "".join(narrow.split())  # a long word may go on in the next line
    assert {word for word in words(wide) - words(narrow) if word not in together} == set()
    assert narrow.count("…") <= wide.count("…")


@pytest.mark.parametrize("command", PICTURES)
def test_pictures(at, command):
    for width in (80, 40):
        shown = at(width, command)
        assert max(map(len, shown.splitlines())) <= width
        assert "causal()" in shown
        assert shown.count("causal() & (window(256, 0) | every(64))\n") <= 1, "its expression is said once"


@pytest.mark.parametrize("command", ["inspect", "check", "cost", "exercise solve"])
def test_help_breaks_no_word(at, command):
    shown = at(80, f"{command} --help")
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert "contributions" in shown or command != "inspect"


def test_only_commands_that_are_to_be_copied_are_longer_than_the_terminal(at):
    long = [line for line in at(80, "course show ceng403-exam").splitlines() if len(line) > 80]
    assert [line for line in long if not line.startswith("   clearhead ")] == []
