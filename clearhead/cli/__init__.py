"""The command line, one file per command. The `clearhead` script runs `main`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors print one line and exit with status 1."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"clearhead: the command needs {error.name}; install it with: pip install 'clearhead[cli]'")
    from clearhead.cli.app import run

    run()


__all__ = ["main"]
