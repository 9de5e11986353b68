"""Output of `python -m benchmarks`: rows as they are measured, and one JSON document or a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from clearhead.cli.output import emit, table

if TYPE_CHECKING:
    from benchmarks.timed import Timing


def print_rows(json: bool, line: Callable[[Any], str] = str) -> Callable[[Any], None]:
    """Return a callback that prints each row as it is measured, unless JSON is requested."""
    return lambda row: None if json else print(line(row), flush=True)


def print_results(rows: Sequence[Any], json: bool, *output: RenderableType) -> None:
    """Print all rows as one JSON document, or `output` without --json."""
    from benchmarks.results import machine, versions

    documents = [row if isinstance(row, dict) else row.to_dict() for row in rows]
    emit(json, {"machine": machine(), "versions": versions(), "rows": documents}, *output)


def run_sections(
    measure: Callable[..., list[Timing]],
    options: Any,
    out: Path,
    *,
    sections: Sequence[str] | None,
    time_limit: float,
    earlier: Path | None,
    json: bool,
) -> None:
    """Run a benchmark with sections, and print its rows and a summary of their ratios.

    Args:
        measure: `changing.measure` or `decoding.measure`.
        options: Its options.
        out: Results file.
        sections: Names of sections; all if None.
        time_limit: Start no further row after this time, in seconds.
        earlier: Results file to resume from, if it exists.
        json: Print one JSON document.
    """
    from benchmarks.timed import SUMMARY_COLUMNS, line, point, read_rows, summary_cells

    def announce(row: Timing) -> None:
        if not json:
            print(f"… {row.section} | {point(row)}", file=sys.stderr, flush=True)

    rows = measure(
        options,
        out,
        sections=sections or (),
        time_limit=time_limit,
        on_start=announce,
        on_row=print_rows(json, line),
        earlier=read_rows(earlier) if earlier is not None and earlier.exists() else (),
    )
    print_results(rows, json, table(SUMMARY_COLUMNS, summary_cells(rows)), f"results written to {out}")
