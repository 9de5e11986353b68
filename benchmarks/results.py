"""Rows and results files: measured values, their ratio, the target of the ratio, and the machine."""

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
    """Base class for the rows of results files: dataclasses whose properties are written together with their fields."""

    def to_dict(self) -> dict[str, Any]:
        """Return fields and properties by name."""
        derived = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}  # type: ignore[call-overload]


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Comparison(Row):
    """Median times of clearhead and of a baseline, and the median ratio of the rounds.

    Attributes:
        name: The two calls that are compared.
        value_ms: Time of clearhead.
        baseline_ms: Time of the baseline.
        ratio: `value_ms / baseline_ms`; lower is better.
        target: Largest acceptable ratio.
    """

    name: str
    value_ms: float
    baseline_ms: float
    ratio: float
    target: float

    @property
    def meets_target(self) -> bool:
        """Whether the ratio is at most the target."""
        return self.ratio <= self.target


def compare(
    name: str,
    call: Callable[[], object],
    baseline: Callable[[], object],
    *,
    target: float,
    repeats: int,
    on_round: Callable[[], None] = lambda: None,
) -> Comparison:
    """Time both calls alternately, `repeats` times each."""
    times, baseline_times = time_alternately(call, baseline, repeats=repeats, on_round=on_round)
    ratio = median(a / b for a, b in zip(times, baseline_times, strict=True))
    return Comparison(name, 1e3 * median(times), 1e3 * median(baseline_times), ratio, target)


@contextmanager
def reading(path: Path, content: str, hint: str) -> Iterator[None]:
    """Raise StorageError if the file is missing or its content is malformed; `hint` says what to do."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} cannot be read as {content} ({error}); {hint}") from error


def write(out: Path, rows: Sequence[Row]) -> None:
    """Write a results file atomically: machine, versions and rows."""
    document = {"machine": machine(), "versions": versions(), "rows": [row.to_dict() for row in rows]}
    write_atomically(out, json.dumps(document, indent=1).encode())


def gather(rows: Iterable[R], out: Path | None, on_row: Callable[[R], None] = lambda row: None) -> list[R]:
    """Collect rows as they are measured; after each one call `on_row` and write all rows so far to `out`."""
    collected: list[R] = []
    for row in rows:
        collected.append(row)
        on_row(row)
        if out is not None:
            write(out, collected)
    return collected


def machine() -> dict[str, Any]:
    """Return processor, threads, GPU and operating system."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"processor": _processor(), "threads": torch.get_num_threads(), "gpu": gpu, "system": platform.system()}


def versions() -> dict[str, str]:
    """Return the versions of clearhead, torch and Python."""
    from clearhead._version import __version__

    return {"clearhead": __version__, "torch": torch.__version__, "python": ".".join(map(str, sys.version_info[:3]))}


def _processor() -> str:
    """Return the model name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search("^model name.*?:(.*)", cpuinfo.read_text(encoding="utf-8"), re.M) if cpuinfo.exists() else None
    return match[1].strip() if match else platform.processor() or platform.machine()
