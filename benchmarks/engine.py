"""The engine beside its peers: every row is one kind of work, done by us and by a peer in one run.

A row is made by a small function that yields it (`Maker`); `makers` lists them by device. Where the goal is an absolute
number the peer is the goal itself, and where it is a ceiling of the machine the peer is that ceiling, so that one
question remains for every row: is the ratio at least what is wanted? Ratios are written so that more is better."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks import results
from clearhead.analysis.cost.timing import time_alternately


@dataclass(frozen=True)
class Row(results.Row):
    """One comparison. `ratio` says how many times better ours is than the peer; `wanted` is the least that
    is wanted."""

    work: str
    unit: str
    ours: float
    peer: str
    peer_value: float
    ratio: float
    wanted: float

    @property
    def holds(self) -> bool:
        return self.ratio >= self.wanted


@dataclass(frozen=True)
class Setting:
    """What a row may ask about the run: the device, where data lie, and whether sizes are cut down to a trial."""

    device: str
    data: Path | None = None  # the folder of en-es, where there is one
    trial: bool = False  # tiny sizes that show that a row works, and measure nothing

    def settle(self) -> None:
        """Waits until a GPU has done its work, or on a CPU the threads of one library no longer spin for more of it."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        elif not self.trial:
            time.sleep(0.4)


Maker = Callable[[Setting], Iterator[Row]]
OnRow = Callable[[Row], None]


def by_rate(work: str, unit: str, ours: float, peer: str, peer_value: float, wanted: float) -> Row:
    """A row of rates: more is better."""
    return Row(work, unit, ours, peer, peer_value, ours / peer_value, wanted)


def by_time(work: str, unit: str, ours: float, peer: str, peer_value: float, wanted: float) -> Row:
    """A row of times or sizes: less is better."""
    return Row(work, unit, ours, peer, peer_value, peer_value / ours, wanted)


def seconds_of(setting: Setting, *calls: Callable[[], object], repeats: int = 3) -> list[float]:
    """The median time of each call."""
    rounds = time_alternately(*calls, repeats=1 if setting.trial else repeats, before=setting.settle)
    return [median(own) for own in rounds]


def makers(device: str) -> dict[str, Maker]:
    """The rows of a device by their makers' names, decoding first."""
    from benchmarks import engine_decode, engine_training

    return engine_decode.ON_GPU | engine_training.ON_GPU if device == "cuda" else engine_decode.ON_CPU


def measure(
    setting: Setting, out: Path | None = None, *, only: str | None = None, on_row: OnRow = lambda row: None
) -> list[Row]:
    """All rows of the setting's device (or those whose work contains `only`), written to `out` as they come."""
    chosen = [make for name, make in makers(setting.device).items() if only is None or only in name]
    return results.gather((row for make in chosen for row in make(setting)), out, on_row)


def line(row: Row) -> str:
    """A row for people."""
    verdict = "" if row.holds else "   NOT REACHED"
    return (
        f"{row.work}: {row.ours:,.4g} {row.unit}, {row.peer} {row.peer_value:,.4g}: "
        f"{row.ratio:.2f} × (wanted {row.wanted:g}){verdict}"
    )
