"""What a measurement is: both times, their ratio, the bound it is held to, and the machine it was made on."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from clearhead._core.atomic_io import write_atomically
from clearhead.analysis.cost.timing import time_alternately
from clearhead.errors import StorageError


class Row:
    """A row of a results file: a dataclass whose properties are written beside its fields."""

    def to_dict(self) -> dict[str, Any]:
        derived = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}  # type: ignore[call-overload]


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Comparison(Row):
    """Our time and the peer's, as medians, and the median of the rounds' ratios."""

    name: str
    ours_ms: float
    peer_ms: float
    ratio: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.ratio <= self.bound


def compare(
    name: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    bound: float,
    repeats: int,
    on_round: Callable[[], None] = lambda: None,
) -> Comparison:
    """Times both in turn."""
    mine, theirs = time_alternately(ours, peer, repeats=repeats, on_round=on_round)
    ratio = median(a / b for a, b in zip(mine, theirs, strict=True))
    return Comparison(name, 1e3 * median(mine), 1e3 * median(theirs), ratio, bound)


@contextmanager
def reading(path: Path, what: str, then: str) -> Iterator[None]:
    """Around reading a file: one that is missing or holds something else is one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} cannot be read as {what} ({error}); {then}") from error


def write(out: Path, rows: Sequence[Row]) -> None:
    """A results file: the machine, the versions and all rows so far, whole or not at all."""
    document = {"machine": machine(), "versions": versions(), "rows": [row.to_dict() for row in rows]}
    write_atomically(out, json.dumps(document, indent=1).encode())


def gather(rows: Iterable[R], out: Path | None, on_row: Callable[[R], None] = lambda row: None) -> list[R]:
    """All rows as they are measured: each is shown, and those so far are written to `out`."""
    found: list[R] = []
    for row in rows:
        found.append(row)
        on_row(row)
        if out is not None:
            write(out, found)
    return found


def machine() -> dict[str, Any]:
    """What was measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"processor": _processor(), "threads": torch.get_num_threads(), "gpu": gpu, "system": platform.system()}


def versions() -> dict[str, str]:
    """What was measured with."""
    from clearhead._version import __version__

    return {"clearhead": __version__, "torch": torch.__version__, "python": ".".join(map(str, sys.version_info[:3]))}


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    found = re.search("^model name.*?:(.*)", known.read_text(encoding="utf-8"), re.M) if known.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
