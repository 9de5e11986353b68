"""The command line: one file a command. `main` is what the `clearhead` script runs."""

from __future__ import annotations


def main() -> None:
    """Runs the command line; an error of ours is one line and exit status 1."""
    from clearhead.cli.app import run

    run()


__all__ = ["main"]
