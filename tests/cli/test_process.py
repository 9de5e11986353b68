"""What only a real process shows: start-up, exit status, Ctrl-C, a closed pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest


def clearhead(*arguments: str, **kwargs):
    command = [sys.executable, "-m", "clearhead.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **kwargs)


def test_a_mistake_leaves_no_traceback():
    done = clearhead("mask", "causal(")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("clearhead: ")


def test_translates_from_a_cold_start():
    """In under 4 s on 2 cores; here the bound is wider, because the tests share the machine."""
    start = time.perf_counter()
    done = clearhead("translate", "-", input="Good morning.\nThank you.\n")
    first, second = done.stdout.splitlines()
    assert first.startswith("Buenos días")
    assert second == "Gracias."
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    "pipe",
    ["mask 'causal()' -n 64 | head -1", "data | head -1", "generate ROMEO: | true", "models --json | true"],
)
def test_a_reader_that_goes_away_is_no_error(pipe):
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m clearhead.cli {pipe}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0
    assert done.stderr == ""


def in_shell(line: str, **variables: str):
    """A line of shell in which `clearhead` is this one."""
    function = f'clearhead() {{ "{sys.executable}" -m clearhead.cli "$@"; }}\n'
    command = ["bash", "-c", function + line]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, check=False, timeout=120, env=environment)


def test_closed_output_leads_nowhere():
    done = in_shell("clearhead mask 'causal()' --svg /dev/null >&-")
    assert (done.returncode, done.stderr) == (0, b"")
    assert in_shell("clearhead mask 'causal(' 2>&-").returncode == 1


def test_closed_input_is_one_sentence():
    done = in_shell("clearhead translate - <&-")
    assert done.returncode == 1
    assert done.stderr == b"clearhead: standard input is closed: give a sentence, or --file PATH\n"


def test_input_in_another_encoding_is_one_sentence():
    done = in_shell("printf 'a\\xff' | clearhead translate -", PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 1
    assert done.stderr.startswith(b"clearhead: standard input cannot be read as utf-8 text: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_full_disk_behind_the_output_is_one_sentence():
    done = in_shell("clearhead mask 'causal()' >/dev/full")
    assert done.returncode == 1
    assert done.stderr == b"clearhead: [Errno 28] No space left on device\n"


def test_what_ascii_cannot_say_is_drawn_in_ascii():
    done = in_shell("clearhead mask 'causal()' -n 3", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\n0 # . .\n1 # # .\n2 # # #\n" in done.stdout
    done = in_shell("clearhead translate 'How are you?' --json", PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout.decode("ascii"))[0]["target"] == "¿Cómo estás?"
