"""Wall-clock times of several implementations of one call: rows, interleaved measurement, and a summary by ratio.

A section of a benchmark lists jobs; each job measures one row. Rows are written as they are measured, so that an
interrupted run loses nothing and is resumed from its file. An implementation that fails has a note in its row.
"""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.results import Row, machine, reading, versions
from clearhead._core.atomic_io import write_atomically
from clearhead.errors import StorageError

Sizes = dict[str, int]
MAX_ROUNDS = 60
WARM_UP_LIMIT = 45.0  # seconds, after which an implementation is abandoned, for example because it compiles
ROW_LIMIT = 90.0  # seconds
HOPELESS = 5.0  # an implementation that is slower than the fastest one by this factor may be called only once,
MIN_HOPELESS = 0.05  # if it takes at least this time, in seconds
TOLERANCE = 1e-9  # of a ratio, for rounding


@dataclass(kw_only=True)
class Timing(Row):
    """Times of several implementations of one call.

    Attributes:
        section: Section of the benchmark.
        name: The mask, the model or the workload.
        sizes: For example length and batch size.
        times: Milliseconds by implementation, the median of all rounds.
        spread: Interquartile range over median, by implementation.
        targets: Largest acceptable ratio by name, such as "changing / repeated"; None for a ratio without a target.
        facts: Other values, for example bytes.
        notes: Reason for each implementation that was not measured.
    """

    section: str
    name: str
    sizes: Sizes = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    targets: dict[str, float | None] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, float]:
        """Ratios of two times by name, as far as both were measured."""
        pairs = {name: name.split(" / ") for name in self.targets}
        measured = {name: pair for name, pair in pairs.items() if all(self.times.get(part) for part in pair)}
        return {name: self.times[value] / self.times[baseline] for name, (value, baseline) in measured.items()}

    @property
    def missed(self) -> list[str]:
        """Names of the ratios above their target."""
        limits = {name: limit for name, limit in self.targets.items() if limit is not None}
        return [name for name, ratio in self.ratios.items() if ratio > limits.get(name, ratio) + TOLERANCE]

    @property
    def key(self) -> tuple[str, ...]:
        """Identify the row: section, name and sizes."""
        return (self.section, self.name, *(f"{name} {size}" for name, size in sorted(self.sizes.items())))


@dataclass(frozen=True)
class Contender:
    """One implementation: `run(prepare(step))` is timed, without `prepare`.

    With `stops_early`, one call is enough if it is far slower than the contenders before it.
    """

    name: str
    run: Callable[[Any], object]
    prepare: Callable[[int], Any] = lambda step: step
    stops_early: bool = False


@dataclass(frozen=True)
class Job:
    """One row to measure. `measure` fills in the times of an empty row.

    Attributes:
        row: The row without times.
        measure: Measures into the row.
        ahead: Functions that compile the kernels of the row, run in other processes before anything is timed.
        limit: Seconds after which the row is abandoned.
        without_peer: Replaces `measure` if the functions in `ahead` did not succeed.
    """

    row: Timing
    measure: Callable[[Timing], None]
    ahead: tuple[partial[Any], ...] = ()
    limit: float = ROW_LIMIT
    without_peer: Callable[[Timing], None] | None = None


# ---------------------------------------------------------------------- measurement


def time_contenders(row: Timing, contenders: Sequence[Contender], *, seconds: float, device: str) -> None:
    """Time all contenders alternately, each for at most about `seconds`, and add the results to the row.

    The device is synchronized before and after each call, so host and device time are both included. The first two
    calls of a contender only warm up, unless the second one alone takes longer than `seconds`. A contender whose first
    call is far slower than the others is not called again.
    """
    times: dict[str, list[float]] = {}
    active: dict[str, Contender] = {}
    for contender in contenders:
        fastest = min((min(values) for values in times.values()), default=float("inf"))
        durations = _warm_up(row, contender, device, max(MIN_HOPELESS, HOPELESS * fastest))
        if durations:
            times[contender.name] = durations[-1:]
            if len(durations) == 2 and durations[1] <= seconds:
                active[contender.name] = contender
    measured = {name: [] if name in active else values for name, values in times.items()}
    gc.disable()
    try:
        _time_rounds(row, active, measured, seconds=seconds, device=device)
    finally:
        gc.enable()
        for name, values in measured.items():
            if values and name not in row.notes:
                add_times(row, name, values)


def _time_rounds(
    row: Timing, active: dict[str, Contender], times: dict[str, list[float]], *, seconds: float, device: str
) -> None:
    """Time the active contenders alternately; the order is reversed after each round."""
    for step in range(2, 2 + MAX_ROUNDS):
        for name in list(active) if step % 2 else list(reversed(active)):
            _time_round(row, active[name], times, step, device)
            if name in row.notes or sum(times[name]) > seconds:
                del active[name]
        if not active:
            break


def add_times(row: Timing, name: str, seconds: Sequence[float]) -> None:
    """Add the durations of one implementation, in seconds, to a row."""
    middle = median(seconds)
    row.times[name] = 1e3 * middle
    if len(seconds) > 2:
        low, _, high = quantiles(seconds, n=4)
        row.spread[name] = (high - low) / middle


def timed(call: Callable[[], object], device: str) -> float:
    """Return the seconds of one call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    """Wait for a GPU; return at once on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def release_memory() -> None:
    """Free the tensors of the last row, and return unused GPU memory to the driver."""
    gc.collect(1)  # objects of the last rows; a full collection would take longer than most rows
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the start of its message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _warm_up(row: Timing, contender: Contender, device: str, hopeless: float) -> list[float]:
    """Run a contender twice, or once if that takes longer than `hopeless` seconds, and return the durations.

    If it fails, return nothing and add a note to the row.
    """
    durations: list[float] = []
    try:
        with abandon_after(WARM_UP_LIMIT):
            for step in range(2):
                arguments = contender.prepare(step)
                durations.append(timed(partial(contender.run, arguments), device))
                if contender.stops_early and durations[0] > hopeless:
                    break
    except Exception as error:  # peers and compilers may raise anything; the row is kept
        row.notes[contender.name] = describe_error(error)
        release_memory()
        return []
    return durations


@contextmanager
def abandon_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some time. It has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def abandon(number: int, frame: object) -> None:
        raise TimeoutError(f"abandoned after {seconds:.0f} s")

    start = time.monotonic()
    previous = signal.signal(signal.SIGALRM, abandon)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if outer:  # an enclosing block
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - start), 1e-3))


def _time_round(row: Timing, contender: Contender, times: dict[str, list[float]], step: int, device: str) -> None:
    """Time a contender once, or note why it fails."""
    try:
        arguments = contender.prepare(step)
        times[contender.name].append(timed(lambda: contender.run(arguments), device))
    except Exception as error:
        row.notes[contender.name] = describe_error(error)


# ---------------------------------------------------------------------- runs and results files


def run_jobs(
    jobs: Iterable[Job],
    out: Path | None = None,
    *,
    seconds: float = float("inf"),
    on_start: Callable[[Timing], None] = lambda row: None,
    on_row: Callable[[Timing], None] = lambda row: None,
    earlier: Sequence[Timing] = (),
    finish: Callable[[Sequence[Timing]], Iterable[Timing]] = lambda rows: (),
) -> list[Timing]:
    """Measure the jobs that have no row in `earlier`, until the time limit, and return all rows.

    Args:
        jobs: Jobs in order of importance.
        out: Results file, written after each row.
        seconds: Start no further job after this time; the last one is abandoned a few seconds later.
        on_start: Called before each row.
        on_row: Called after each row.
        earlier: Rows of an earlier run.
        finish: Returns additional rows that follow from all measured rows.
    """
    deadline = time.monotonic() + seconds
    rows = {row.key: row for row in earlier}
    for job in jobs:
        if job.row.key in rows:
            continue
        if time.monotonic() > deadline:
            break
        row = job.row
        on_start(row)
        try:
            with abandon_after(min(job.limit, max(5.0, deadline - time.monotonic()))):
                job.measure(row)
        except Exception as error:
            row.notes["row"] = describe_error(error)
        rows[row.key] = row
        on_row(row)
        if out is not None:
            write(out, list(rows.values()))
        release_memory()
    for row in finish(list(rows.values())):
        rows[row.key] = row
        on_row(row)
    if out is not None:
        write(out, list(rows.values()))
    return list(rows.values())


def write(out: Path, rows: Sequence[Timing]) -> None:
    """Write a results file atomically: machine, versions, summary and rows."""
    document = {"machine": machine(), "versions": versions(), "summary": summarize(rows)}
    document |= {"rows": [row.to_dict() for row in rows]}
    write_atomically(out, json.dumps(document, indent=1).encode())


def read_rows(path: Path) -> list[Timing]:
    """Return the rows of an earlier run; raise StorageError if it was measured on another kind of machine."""
    rows = read_any_rows(path)
    device = json.loads(path.read_text(encoding="utf-8"))["machine"]["gpu"] or "a CPU"
    this_device = machine()["gpu"] or "a CPU"
    if device != this_device:
        raise StorageError(f"{path} was measured on {device}, not on {this_device}; write to a new file")
    return rows


def read_any_rows(path: Path) -> list[Timing]:
    """Return the rows of a results file of any machine."""
    with reading(path, "results", "expected a file that the same command wrote with --out"):
        document = json.loads(path.read_text(encoding="utf-8"))
        names = {f.name for f in fields(Timing)}
        _ = document["machine"]["gpu"]
        return [Timing(**{name: row[name] for name in names & row.keys()}) for row in document["rows"]]


def summarize(rows: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return one entry for each ratio of each section: target, number of rows within it, median, best, worst."""
    names = dict.fromkeys((row.section, name) for row in rows for name in row.ratios)
    return [_summary(rows, section, name) for section, name in names]


def _summary(rows: Sequence[Timing], section: str, name: str) -> dict[str, Any]:
    """Summarize one ratio of one section."""
    selected = [row for row in rows if row.section == section and name in row.ratios]
    ordered = sorted(selected, key=lambda row: row.ratios[name])
    best, worst = ordered[0], ordered[-1]
    targets = [row.targets[name] for row in selected if row.targets[name] is not None]
    return {
        "section": section,
        "ratio": name,
        "target": max((target for target in targets if target is not None), default=None),
        "rows": len(selected),
        "met": sum(name not in row.missed for row in selected) if targets else None,
        "median": median(row.ratios[name] for row in selected),
        "best": {"ratio": best.ratios[name], "point": point(best)},
        "worst": {"ratio": worst.ratios[name], "point": point(worst)},
    }


def point(row: Timing) -> str:
    """Return the name and the sizes of a row."""
    return ", ".join([row.name, *(f"{name} {size:,}" for name, size in row.sizes.items())])


def line(row: Timing) -> str:
    """Format a row for the terminal."""
    times = "  ".join(f"{name} {value:.3f}" for name, value in row.times.items())
    ratios = "  ".join(
        f"{name}: {ratio:.2f}{' TOO SLOW' if name in row.missed else ''}" for name, ratio in row.ratios.items()
    )
    notes = "  ".join(f"[{name}: {note[:60]}]" for name, note in row.notes.items())
    return f"{row.section} | {point(row)} | ms: {times} | {ratios} {notes}".rstrip()


def summary_cells(rows: Sequence[Timing]) -> list[tuple[str, ...]]:
    """Return the cells of a table of `summarize`: the best point is followed by the worst."""

    def cell(end: Mapping[str, Any]) -> str:
        return f"{end['ratio']:.2f} ({end['point']})"

    return [
        (
            entry["section"],
            entry["ratio"],
            "–" if entry["target"] is None else f"≤ {entry['target']:.3g}",
            str(entry["rows"]) if entry["met"] is None else f"{entry['met']} of {entry['rows']}",
            f"{entry['median']:.2f}",
            cell(entry["best"]),
            cell(entry["worst"]),
        )
        for entry in summarize(rows)
    ]


SUMMARY_COLUMNS = ("section", "ratio", "target", "met", "median", "best", "worst")
