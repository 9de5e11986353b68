"""What only a real process shows: start-up, exit status, Ctrl-C, a closed pipe. Commands that do without torch show it
in a tenth of the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def clearhead(*arguments: str, **kwargs):
    command = [sys.executable, "-m", "clearhead.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


def test_a_mistake_leaves_no_traceback():
    done = clearhead("models", "nothing-of-this-name")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("clearhead: ")


COLD = """
import contextlib, cProfile, json, sys
import torch
before, profile = set(sys.modules), cProfile.Profile()
from clearhead.cli import main
sys.argv = ["clearhead", "translate", "-"]
with profile, contextlib.suppress(SystemExit):
    main()
calls = sum(entry.callcount for entry in profile.getstats())
print(json.dumps({"calls": calls, "modules": sorted(set(sys.modules) - before)}))
"""


def test_translates_from_a_cold_start():
    """`python -m benchmarks attention` times the start; here the work is counted that it may take."""
    command = [sys.executable, "-c", COLD]
    done = subprocess.run(command, input="Good morning.\nThank you.\n", capture_output=True, text=True, check=True)
    first, second, found = done.stdout.splitlines()
    assert first.startswith("Buenos días")
    assert second == "Gracias."
    took = json.loads(found)
    assert took["calls"] < 4_000_000
    assert len(took["modules"]) < 1_500
    packages = {name.split(".")[1] for name in took["modules"] if name.startswith("clearhead.")}
    assert "hub" in packages
    assert not packages & {"analysis", "course", "explorer"}
    others = {name.split(".")[0] for name in took["modules"]}
    assert not others & {
        "benchmarks",
        "matplotlib",
        "scipy",
        "sklearn",
        "sacrebleu",
        "transformers",
        "tensorboard",
        "IPython",
    }


LIGHT = """
import contextlib, json, sys
from clearhead.cli import main
from clearhead.cli.app import every_command

def run(*arguments):
    sys.argv = ["clearhead", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, arguments

with contextlib.redirect_stdout(None):
    run("--version")
    run("models")
    run("models", "en-es")
    run("data")
    run("course", "list")
    for words in every_command():
        run(*words, "--help")
print(json.dumps([len(list(every_command())), sorted({name.split(".")[0] for name in sys.modules})]))
"""


def test_what_computes_nothing_answers_without_torch():
    """Every command's help, the version and the lists: in one process, for what one imports the others would see."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commands, modules = json.loads(done.stdout)
    assert commands > 30
    assert not {"torch", "sympy", "numpy", "matplotlib", "tokenizers", "safetensors"} & set(modules)


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
    )
    assert done.returncode == 0
    assert done.stderr == ""


def in_shell(line: str, **variables: str):
    """A line of shell in which `clearhead` is this one."""
    function = f'clearhead() {{ "{sys.executable}" -m clearhead.cli "$@"; }}\n'
    command = ["bash", "-c", function + line]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, check=False, env=environment)


def test_closed_output_leads_nowhere():
    done = in_shell("clearhead data >&-")
    assert (done.returncode, done.stderr) == (0, b"")
    assert in_shell("clearhead models nothing-of-this-name 2>&-").returncode == 1


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
    done = in_shell("clearhead data >/dev/full")
    assert done.returncode == 1
    assert done.stderr == b"clearhead: [Errno 28] No space left on device\n"


def test_what_ascii_cannot_say_is_drawn_in_ascii():
    done = in_shell("clearhead mask 'causal()' -n 3", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\n0 # . .\n1 # # .\n2 # # #\n" in done.stdout
    done = in_shell("clearhead translate 'How are you?' --json", PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout.decode("ascii"))[0]["target"] == "¿Cómo estás?"
