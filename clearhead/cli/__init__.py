"""The command line, one file per command. The `clearhead` script runs `main`."""

from __future__ import annotations


def main() -> None:
    """Run the command line; errors print one line and exit with status 1."""
    from clearhead.cli.app import run

    run()


__all__ = ["main"]
