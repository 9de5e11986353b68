"""Behavior that needs a real process: start-up, exit status, closed pipes. Most tests use commands that do not import
torch, because they start ten times faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from clearhead import __version__


def clearhead(*arguments: str, **kwargs):
    command = [sys.executable, "-m", "clearhead.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


def test_invalid_input_prints_no_traceback():
    completed = clearhead("models", "nothing-of-this-name")
    assert completed.returncode == 1
    assert "Traceback" not in completed.stderr
    assert completed.stderr.startswith("clearhead: ")


def test_python_m_clearhead_is_the_command():
    command = [sys.executable, "-m", "clearhead", "--version"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stdout == f"clearhead {__version__}\n"


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


def test_cold_start_of_translate_is_within_its_work_budget():
    """Counts calls and imports, because tests do not measure time."""
    command = [sys.executable, "-c", COLD]
    completed = subprocess.run(command, input="Good morning.\nThank you.\n", capture_output=True, text=True, check=True)
    first, second, counts = completed.stdout.splitlines()
    assert first.startswith("Buenos días")
    assert second == "Gracias."
    work = json.loads(counts)
    assert work["calls"] < 4_000_000
    assert len(work["modules"]) < 1_500
    packages = {name.split(".")[1] for name in work["modules"] if name.startswith("clearhead.")}
    assert "hub" in packages
    assert not packages & {"analysis", "course", "explorer"}
    top_level = {name.split(".")[0] for name in work["modules"]}
    assert not top_level & {
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


def test_help_and_lists_do_not_import_torch():
    """Runs the help of every command, the version and the lists in one process."""
    completed = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    commands, modules = json.loads(completed.stdout)
    assert commands > 30
    assert not {"torch", "sympy", "numpy", "matplotlib", "tokenizers", "safetensors"} & set(modules)


@pytest.mark.parametrize(
    "pipe",
    ["mask 'causal()' -n 64 | head -1", "data | head -1", "generate ROMEO: | true", "models --json | true"],
)
def test_closed_pipe_is_not_an_error(pipe):
    completed = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m clearhead.cli {pipe}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0
    assert completed.stderr == ""


def in_shell(line: str, **variables: str):
    """Run a line of shell in which `clearhead` is this command."""
    function = f'clearhead() {{ "{sys.executable}" -m clearhead.cli "$@"; }}\n'
    command = ["bash", "-c", function + line]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, check=False, env=environment)


def test_closed_output_is_ignored():
    completed = in_shell("clearhead data >&-")
    assert (completed.returncode, completed.stderr) == (0, b"")
    assert in_shell("clearhead models nothing-of-this-name 2>&-").returncode == 1


def test_closed_input_is_a_one_line_error():
    completed = in_shell("clearhead translate - <&-")
    assert completed.returncode == 1
    assert completed.stderr == b"clearhead: standard input is closed: give a sentence, or --file PATH\n"


def test_input_in_another_encoding_is_a_one_line_error():
    completed = in_shell("printf 'a\\xff' | clearhead translate -", PYTHONIOENCODING="utf-8:strict")
    assert completed.returncode == 1
    assert completed.stderr.startswith(b"clearhead: standard input cannot be read as utf-8 text: ")
    assert len(completed.stderr.splitlines()) == 1


def test_full_disk_is_a_one_line_error():
    completed = in_shell("clearhead data >/dev/full")
    assert completed.returncode == 1
    assert completed.stderr == b"clearhead: [Errno 28] No space left on device\n"


def test_ascii_output_replaces_other_characters():
    completed = in_shell("clearhead mask 'causal()' -n 3", PYTHONIOENCODING="ascii")
    assert (completed.returncode, completed.stderr) == (0, b"")
    assert b"\n0 # . .\n1 # # .\n2 # # #\n" in completed.stdout
    completed = in_shell("clearhead translate 'How are you?' --json", PYTHONIOENCODING="ascii")
    assert json.loads(completed.stdout.decode("ascii"))[0]["target"] == "¿Cómo estás?"
