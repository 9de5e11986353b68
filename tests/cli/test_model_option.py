"""Every command that uses a model takes it as `--model NAME`."""

from __future__ import annotations

import pytest
import typer

from clearhead.cli.app import whole_app
from clearhead.cli.options import ModelCommand

COMMANDS = [
    *("translate", "generate", "embed", "transcribe", "listen"),
    *("inspect", "walk", "evaluate", "check", "cost", "export", "explore", "models"),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_with_a_model_has_the_option(name):
    command = typer.main.get_command(whole_app()).commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert "--model" in options or isinstance(command, ModelCommand)


def test_commands_with_a_model_are_listed_here():
    commands = typer.main.get_command(whole_app()).commands
    used = {name for name, command in commands.items() if {"model", "models"} & {p.name for p in command.params}}
    assert used | {"models"} == set(COMMANDS)


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ("models en-es --json", "models --model en-es --json"),
        ("models en-es --json", "models --json --model=en-es"),
        ("cost tiny-decoder --tokens 7 --json", "cost --tokens 7 --model tiny-decoder --json"),
        ("inspect sort-dedup D --json", "inspect D --model sort-dedup --json"),
        ("inspect sort-dedup --json -- D", "inspect --model sort-dedup --json -- D"),
        ("walk sort-dedup D --json", "walk --model sort-dedup D --json"),
    ],
)
def test_model_as_option_equals_model_as_argument(cli, argument, option):
    expected, actual = cli(*argument.split()), cli(*option.split())
    assert expected.code == actual.code == 0
    assert actual.out == expected.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("inspect --model", "Missing argument"),
        ("export --model en-es sort-dedup --out folder", "unexpected extra argument"),
    ],
)
def test_missing_or_repeated_model_is_a_usage_error(cli, words, message):
    ran = cli(*words.split())
    assert ran.code == 2
    assert message in " ".join(ran.err.split())
