"""The `clearhead` command itself: its options, its list of commands, and what happens when one fails.

Commands import what they need when they run, or take it from packages that load their names when asked for them, so
that `--help` answers at once."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import typer

from clearhead._version import __version__
from clearhead.cli.options import option

app = typer.Typer(
    name="clearhead",
    help="Transformers with nothing hidden: the textbook, the laboratory and the engine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Boxes cut long words where they have no room; help without them is broken at any width, and nothing is lost.
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= 60 else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Modules of clearhead.cli, each of which registers its commands on import. `--help` shows the commands in this order,
# groups last.
_COMMANDS = (
    *("translate", "train", "evaluate", "generate", "embed", "transcribe", "listen", "look", "walk", "explore", "work"),
    *("exam", "mask", "cost", "check", "claims", "documents", "plot", "bench", "models", "data", "export", "demo"),
)


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"clearhead {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[
        bool, option("Print the version and stop.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Transformers with nothing hidden: the textbook, the laboratory and the engine."""


def _without_a_reader() -> NoReturn:
    """The reader went away (`clearhead … | head`): nothing is wrong. Python would complain at exit without this."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(0)


def _reflow(commands: typer.Typer) -> None:
    """Paragraphs of help as one line each, which the terminal then breaks by its own width."""
    for command in commands.registered_commands:
        if command.callback is not None:
            parts = inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")
            kept = [part if part.startswith(" ") else part.replace("\n", " ") for part in parts]
            command.callback.__doc__ = "\n\n".join(kept)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _reflow(group.typer_instance)


def every_command() -> Iterator[tuple[str, ...]]:
    """The words of each command, in the order of `--help`: ("translate",), …, ("claims", "run"), …"""

    def of(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, command in group.commands.items():
            yield (*words, name)
            yield from of(command, (*words, name)) if hasattr(command, "commands") else ()

    yield from of(typer.main.get_command(whole_app()), ())


def whole_app() -> typer.Typer:
    """The command line with all its commands."""
    for name in _COMMANDS:
        importlib.import_module(f"clearhead.cli.{name}")
    _reflow(app)
    return app


def run() -> None:
    """Runs the command line and ends the process: 0, 1 with one line for our errors and the system's, 2 for
    wrong usage."""
    whole_app()
    from clearhead.cli.output import fail, prepare_streams

    prepare_streams()
    try:
        try:
            app(prog_name="clearhead")
        finally:
            sys.stdout.flush()  # here, and not at exit, where Python complains of a reader that went away
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _without_a_reader()
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        _without_a_reader()  # rich and click make an exit status of it
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
