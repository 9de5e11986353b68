"""The rows of `clearhead bench sparse`: what one holds, its line on a terminal, and the file they are kept in."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from clearhead.bench.results import Row, machine, reading
from clearhead.errors import StorageError


@dataclass
class Masked(Row):
    """One mask at one size. Times in ms; None where something was not measured, `notes` say why."""

    derived = ("fraction", "fraction_both", "of_ideal")

    name: str
    mask: str
    length: int
    width: int
    batch: int
    heads: int
    density: float = 0.0
    computed: float = 0.0  # pairs computed as a fraction of all
    plan_ms: float = 0.0  # first plan of the queries' side
    plan_keys_ms: float = 0.0
    plan_bytes: int = 0
    dense: float | None = None
    dense_both: float | None = None
    flex: float | None = None
    flex_both: float | None = None
    ours: float | None = None
    ours_both: float | None = None
    host: float | None = None  # ms that the host takes to issue our forward pass
    peak_bytes: int | None = None  # of our forward + backward, beyond the inputs
    wanted: float | None = None
    wanted_both: float | None = None
    notes: str = ""

    @property
    def fraction(self) -> float | None:
        """Our time over that of attention without a mask."""
        return _ratio(self.ours, self.dense)

    @property
    def fraction_both(self) -> float | None:
        return _ratio(self.ours_both, self.dense_both)

    @property
    def of_ideal(self) -> float | None:
        """1 where a mask takes its density's share of the time without one."""
        return None if self.ours is None or self.dense is None else self.density * self.dense / self.ours


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def line(row: Masked) -> str:
    """A row for the terminal."""

    def cell(fraction: float | None) -> str:
        return "      –" if fraction is None else f"{fraction:7.3f}"

    return (
        f"{row.name:28} T {row.length:6} D {row.width:3} density {row.density:.4f} computed {row.computed:.4f} | "
        f"ours {cell(row.fraction)} {cell(row.fraction_both)} | "
        f"flex {cell(_ratio(row.flex, row.dense))} {cell(_ratio(row.flex_both, row.dense_both))} | "
        f"plan {row.plan_ms:.0f}+{row.plan_keys_ms:.0f} ms {row.notes}"
    )


def read_rows(path: Path) -> list[Masked]:
    """The rows that an earlier run wrote; they must come from the same kind of machine."""
    with reading(path, "results", "go on from a file that `clearhead bench sparse --out` wrote"):
        document = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Masked)}
        rows = [Masked(**{name: row[name] for name in known & row.keys()}) for row in document["rows"]]
        device, here = document["machine"]["gpu"] or "a CPU", machine()["gpu"] or "a CPU"
    if device != here:
        raise StorageError(f"{path} was measured on {device}, not on {here}; begin a new file here")
    return rows
