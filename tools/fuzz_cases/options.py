"""Huge and special values for every numeric option of every command. A command works or prints one line."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from tools.fuzz_cases import Case, CaseFailure
from tools.fuzz_cases.sandbox import Budget

BUDGET = Budget(cpu_seconds=60, memory=2 << 30)

VALUES = (
    *("0", "-1", "2147483647", "2147483648", "-2147483649", "4294967296", "9223372036854775807"),
    *("9223372036854775808", "-9223372036854775809", "18446744073709551616", "99999999999999999999"),
    *("1" + "0" * 40, "-1" + "0" * 40, "9999999999999", "1000000", "1e400", "nan", "inf", "-inf", "1e-400"),
)

ARGUMENTS: dict[str, list[str]] = {
    "translate": ["Hello."],
    "evaluate": ["sort-dedup"],
    "generate": ["KING:", "--max-new-tokens", "3"],
    "listen": ["{wav}"],
    "inspect": ["sort-dedup", "D A A"],
    "walk": ["sort-dedup", "D A A"],
    "exercise solve": ["attention-by-hand"],
    "exam": ["--from", "ceng403-exam", "--out", "{out}.md"],
    "mask": ["causal() & window(3, 0)", "--n", "7"],
    "cost": ["sort-dedup", "--tokens", "7"],
    "check": ["sort-dedup"],
    "claims run": ["scale-key-weight"],
    "claims show": ["scale-key-weight"],
    "claims quiz": [],
    "train-tokenizer": ["{text}", "--out", "{out}"],
    "plot schedule": ["--out", "{out}.svg"],
    "plot positions": ["--out", "{out}.svg"],
}
"""Arguments with which a command is quick, by its words; without an entry its options are not drawn."""

EXCLUDED = {
    "embed": "needs an encoder, and no bundled model is one",
    "exercise grade": "needs a file of answers",
    "data tokenize": "starts worker processes",
    "explore": "starts a server",
    "claims report": "runs every claim, which takes minutes",
}
"""Commands with numeric options that are not drawn, and why."""


@cache
def numeric_options() -> dict[str, tuple[str, ...]]:
    """Return the numeric options of each command, by the command's words."""
    from clearhead.cli.app import whole_app

    return dict(_numeric(typer.main.get_command(whole_app()), ()))


def _numeric(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Walk over a command and its subcommands."""
    if hasattr(command, "commands"):
        for name, subcommand in command.commands.items():
            yield from _numeric(subcommand, (*words, name))
        return
    options = [
        parameter.opts[0]
        for parameter in command.params
        if parameter.opts[0].startswith("-") and _is_numeric(parameter)
    ]
    if options:
        yield " ".join(words), tuple(options)


def _is_numeric(parameter: Any) -> bool:
    """Return whether a parameter is an int, a float, or one of them or None."""
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is None:  # typer before 0.28, whose parameters have the types of click
        return str(parameter.type.name).partition(" ")[0] in ("integer", "float")
    annotation = descriptor.annotation
    return annotation in (int, float) or any(name in str(annotation) for name in ("int |", "float |", "| int"))


def prepare() -> None:
    """Import all commands."""
    numeric_options()


def draw(chance: random.Random, device: str) -> Case:
    """Draw a command, one or two of its numeric options, and values for them."""
    command = chance.choice([name for name in numeric_options() if name in ARGUMENTS])
    options = numeric_options()[command]
    names = chance.sample(options, min(len(options), chance.choice([1, 1, 2])))
    return {"command": command, "options": [[name, chance.choice(VALUES)] for name in names]}


def check(case: Case) -> list[str]:
    """Run the command in this process and classify its exit status."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        arguments = [*case["command"].split(), *_arguments(case["command"], Path(folder))]
        for name, value in case["options"]:
            arguments += [f"{name}={value}"] if name.startswith("--") else [name, value]
        status, error = run_command(arguments)
    line = f"clearhead {' '.join(arguments)}"
    if status not in (0, 1, 2) or "Traceback" in error:
        raise CaseFailure(f"exit status {status} | {line} | {error[-600:]}")
    if status == 1 and len(error.strip().splitlines()) > 40:
        raise CaseFailure(f"more than a message on stderr | {line} | {error[:600]}")
    return [case["command"], f"exit {status}"]


def run_command(arguments: list[str]) -> tuple[int, str]:
    """Run a command line in this process; return its exit status and what it printed on stderr."""
    from clearhead.cli.app import run

    output, error = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["clearhead", *arguments]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
            run()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return status, error.getvalue()


def _arguments(command: str, folder: Path) -> list[str]:
    """Fill in the files that a command needs."""
    from tools.fuzz_cases.headers import wav

    text, sound = folder / "text.txt", folder / "sound.wav"
    text.write_text("the cat sat on the mat\nthe dog sat on the log\n" * 9, encoding="utf-8")
    sound.write_bytes(wav(b"\0\0" * 4000))
    paths = {"{text}": str(text), "{wav}": str(sound), "{out}": str(folder / "out")}
    filled = []
    for argument in ARGUMENTS[command]:
        for key, path in paths.items():
            argument = argument.replace(key, path)
        filled.append(argument)
    return filled
