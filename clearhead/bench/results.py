"""What a measurement is: both times, their ratio, the bound it is held to, and the machine it was made on."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, TypeVar

import torch

from clearhead._clock import seconds
from clearhead.disk import write_atomically
from clearhead.errors import StorageError


class Row:
    """A row of a results file: a dataclass whose properties named in `derived` are written beside its fields."""

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {name: getattr(self, name) for name in self.derived}  # type: ignore[call-overload]


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Comparison(Row):
    """Our time and the peer's, as medians, and the median of the rounds' ratios."""

    derived = ("holds",)
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
    """Times both in turn, which one first changing by the round, so that a slow spell hits both alike."""
    ours(), peer()
    pairs: list[tuple[float, float]] = []
    for i in range(repeats):
        if i % 2:
            theirs, mine = seconds(peer), seconds(ours)
        else:
            mine, theirs = seconds(ours), seconds(peer)
        pairs.append((mine, theirs))
        on_round()
    return Comparison(
        name=name,
        ours_ms=1e3 * median(mine for mine, _ in pairs),
        peer_ms=1e3 * median(theirs for _, theirs in pairs),
        ratio=median(mine / theirs for mine, theirs in pairs),
        bound=bound,
    )


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


def gather(rows: Iterable[R], out: Path | None, on_row: Callable[[R], None]) -> list[R]:
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
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names: Sequence[str] = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
