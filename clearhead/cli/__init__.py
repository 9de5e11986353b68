"""The command line, one file per command. The `clearhead` script runs `main`."""

from __future__ import annotations

import sys

INTERRUPTED = 130  # exit status after Ctrl-C, as in shells


def main() -> None:
    """Run the command line; errors print one line and exit with status 1."""
    try:
        try:
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ImportError as error:
            sys.exit(f"clearhead: the command needs {error.name}; install it with: pip install 'clearhead[cli]'")
        from clearhead.cli.app import run

        run()
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(INTERRUPTED)


__all__ = ["main"]
