"""The `clearhead` command: its list of commands, its options, and its handling of errors.

Commands import what they need when they run, so that `--help` is fast."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Annotated, NoReturn

import typer

from clearhead._version import __version__
from clearhead.cli import INTERRUPTED
from clearhead.cli.options import option

app = typer.Typer(
    name="clearhead",
    help="Transformers with nothing hidden: a textbook, a laboratory and an engine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # In a narrow terminal rich's boxes cut long words; plain help wraps at any width.
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= 60 else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Modules of clearhead.cli, each of which registers its commands on import. `--help` shows the commands in this order,
# groups last.
_COMMANDS = (
    *(
        "translate",
        "train",
        "evaluate",
        "generate",
        "embed",
        "transcribe",
        "listen",
        "inspect",
        "walk",
        "explore",
        "exercise",
    ),
    *("exam", "mask", "cost", "check", "claims", "course", "plot", "models", "data", "export", "convert", "demo"),
)


def _print_version(is_requested: bool) -> bool:
    if is_requested:
        typer.echo(f"clearhead {__version__}")
        raise typer.Exit
    return is_requested


@app.callback()
def options(
    version: Annotated[
        bool, option("Print the version and exit.", "--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Transformers with nothing hidden: a textbook, a laboratory and an engine."""


def _exit_on_broken_pipe() -> NoReturn:
    """Exit successfully after the reader closed the pipe (`clearhead … | head`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(0)


def _reflow(commands: typer.Typer) -> None:
    """Join each paragraph of help into one line, which the terminal wraps at its width."""
    for command in commands.registered_commands:
        if command.callback is not None:
            parts = inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")
            paragraphs = [part if part.startswith(" ") else part.replace("\n", " ") for part in parts]
            command.callback.__doc__ = "\n\n".join(paragraphs)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _reflow(group.typer_instance)


def every_command() -> Iterator[tuple[str, ...]]:
    """Yield the words of each command, such as ("claims", "run"), in the order of `--help`."""

    def walk(command: object, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, subcommand in getattr(command, "commands", {}).items():
            yield (*words, name)
            yield from walk(subcommand, (*words, name))

    yield from walk(typer.main.get_command(whole_app()), ())


def whole_app() -> typer.Typer:
    """Return the command line with all its commands."""
    for name in _COMMANDS:
        importlib.import_module(f"clearhead.cli.{name}")
    _reflow(app)
    return app


def run() -> None:
    """Run the command line and exit: status 0, 1 with a one-line error, or 2 for wrong usage."""
    run_app(whole_app(), "clearhead")


def run_app(commands: typer.Typer, program: str) -> None:
    """Run a command line under the name `program` and exit as `run` does."""
    from clearhead.cli.output import fail, prepare_streams, short_warnings

    prepare_streams()
    try:
        try:
            with short_warnings():
                commands(prog_name=program)
        finally:
            sys.stdout.flush()  # not at exit, where Python reports a broken pipe as an error
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _exit_on_broken_pipe()
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        _exit_on_broken_pipe()  # rich and click convert it to an exit status
    except Exception as error:
        from clearhead.errors import ClearheadError

        # Errors of the system, such as a full disk, are not defects of the program.
        if isinstance(error, ClearheadError | OSError):
            fail(str(error).partition("\n")[0])
        if _is_out_of_memory(error):
            fail("the requested sizes need more memory than there is; choose smaller ones")
        raise


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that a tensor is too large for the memory or for an index."""
    messages = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
    return isinstance(error, MemoryError | OverflowError) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
    )
