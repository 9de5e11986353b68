"""Training and decoding compared with baselines: `python -m benchmarks engine`.

Rows are yielded by small functions of type `Benchmark`; `benchmarks_for` lists them by device. If the goal is an
absolute number, the baseline is that goal; if it is a limit of the machine, the baseline is that limit. Every row then
has the same question: does the speedup reach the target? Speedups are defined so that more is better.
"""

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
    """One comparison.

    Attributes:
        benchmark: Name of the benchmark, with its sizes.
        unit: Unit of both values.
        value: Result of clearhead.
        baseline: Name of the baseline.
        baseline_value: Its result.
        speedup: Ratio by which clearhead is better.
        target: Smallest acceptable speedup.
    """

    benchmark: str
    unit: str
    value: float
    baseline: str
    baseline_value: float
    speedup: float
    target: float

    @property
    def meets_target(self) -> bool:
        """Whether the speedup is at least the target."""
        return self.speedup >= self.target


@dataclass(frozen=True)
class Setting:
    """Options of a run.

    Attributes:
        device: "cpu" or "cuda".
        data: Folder with the sentence pairs of en-es, if available.
        smoke: Use tiny sizes, which show that a benchmark runs; timings are not meaningful.
    """

    device: str
    data: Path | None = None
    smoke: bool = False

    def synchronize(self) -> None:
        """Wait for a GPU, or on a CPU until the idle threads of the previous library stop spinning."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        elif not self.smoke:
            time.sleep(0.4)


Benchmark = Callable[[Setting], Iterator[Row]]
OnRow = Callable[[Row], None]


def by_rate(benchmark: str, unit: str, value: float, baseline: str, baseline_value: float, target: float) -> Row:
    """Return a row of rates, where more is better."""
    return Row(benchmark, unit, value, baseline, baseline_value, value / baseline_value, target)


def by_time(benchmark: str, unit: str, value: float, baseline: str, baseline_value: float, target: float) -> Row:
    """Return a row of times or sizes, where less is better."""
    return Row(benchmark, unit, value, baseline, baseline_value, baseline_value / value, target)


def seconds_of(setting: Setting, *calls: Callable[[], object], repeats: int = 3) -> list[float]:
    """Return the median time of each call."""
    times_by_call = time_alternately(*calls, repeats=1 if setting.smoke else repeats, before=setting.synchronize)
    return [median(times) for times in times_by_call]


def benchmarks_for(device: str) -> dict[str, Benchmark]:
    """Return the benchmarks of a device by name, decoding first."""
    from benchmarks import engine_decode, engine_training

    return engine_decode.ON_GPU | engine_training.ON_GPU if device == "cuda" else engine_decode.ON_CPU


def measure(
    setting: Setting, out: Path | None = None, *, name_filter: str | None = None, on_row: OnRow = lambda row: None
) -> list[Row]:
    """Run the benchmarks of the device whose name contains `name_filter`; write rows to `out` as they are measured."""
    available = benchmarks_for(setting.device)
    selected = [run for name, run in available.items() if name_filter is None or name_filter in name]
    return results.gather((row for run in selected for row in run(setting)), out, on_row)


def line(row: Row) -> str:
    """Format a row for the terminal."""
    verdict = "" if row.meets_target else "   NOT REACHED"
    return (
        f"{row.benchmark}: {row.value:,.4g} {row.unit}, {row.baseline} {row.baseline_value:,.4g}: "
        f"{row.speedup:.2f} × (target {row.target:g}){verdict}"
    )
