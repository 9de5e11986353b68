"""Integers beyond 64 bits are usage errors on every option and argument of every command."""

from __future__ import annotations

import typing

import typer

from clearhead.cli.app import whole_app

HUGE = 10**40


def integer_options():
    """Return (words of the command, option) for every integer option of every command."""

    def walk(commands, words):
        for command in commands.registered_commands:
            name = command.name or command.callback.__name__.rstrip("_").replace("_", "-")
            for parameter, hint in typing.get_type_hints(command.callback, include_extras=True).items():
                types = str(typing.get_args(hint)[0]) if typing.get_origin(hint) is typing.Annotated else ""
                info = typing.get_args(hint)[-1] if types else None
                if isinstance(info, typer.models.OptionInfo) and "int" in types.replace("print", ""):
                    names = [
                        name
                        for name in (info.default, *(info.param_decls or ()))
                        if isinstance(name, str) and name.startswith("--")
                    ]
                    yield (*words, name), names[0] if names else f"--{parameter.rstrip('_').replace('_', '-')}"
        for group in commands.registered_groups:
            yield from walk(group.typer_instance, (*words, group.name or group.typer_instance.info.name))

    return list(walk(whole_app(), ()))


def test_integer_options_reject_integers_beyond_64_bits(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    options = integer_options()
    assert len(options) > 30
    accepted = []
    for words, option in options:
        for value in (HUGE, -HUGE):
            ran = cli(*words, f"{option}={value}")
            if ran.code != 2 or "Invalid value for" not in ran.err or option not in ran.err:
                accepted.append((words, option, value, ran.code, " ".join(ran.err.split("\n")[3:4])[:200]))
    assert accepted == []


def test_sizes_beyond_the_memory_are_a_one_line_error(cli):
    ran = cli("inspect", "torch.nn:Flatten", "--input-dim", 7, "--length", 1 << 62)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "clearhead: the requested sizes need more memory than there is; choose smaller ones\n"
