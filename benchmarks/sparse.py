"""Time of attention under a mask, relative to dense attention: `python -m benchmarks sparse`.

Each row is one mask at one length and head dim: dense attention (cuDNN on a GPU), FlexAttention compiled for the mask
(on a GPU), and sparse attention, forward and forward + backward. GPU times are device times with a filled queue, as in
a model; the host time per call is a separate column. Rows are written as they are measured, most important first, so
that an interrupted run loses nothing and can be resumed from its file.

    python -m benchmarks sparse --out sparse.json --time-limit 240
    python -m benchmarks sparse --out sparse.json --resume sparse.json
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import Row, machine, reading, write
from benchmarks.sparse_flex import Key, compile_ahead, flex_attention_under
from clearhead._core.caches import clear_caches
from clearhead._core.plotting import new_figure, plot_style, save_figure
from clearhead.analysis.cost.timing import milliseconds, seconds
from clearhead.attention.attend import attend
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.normalizers import Softmax
from clearhead.attention.observe import Impl
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel
from clearhead.attention.sparse.plan import Plan
from clearhead.errors import StorageError
from clearhead.masks import Causal, Mask
from clearhead.masks.catalogue import CATALOGUE, Pattern

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # queries, keys, values, and the gradient of the output
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Statistic = Callable[[Iterable[float]], float]
LENGTHS = (16384, 131072, 4096, 65536)
WIDTHS = (64, 128)


@dataclass(frozen=True)
class Options:
    """Sizes, device and time limit of a run, and whether FlexAttention is measured."""

    lengths: tuple[int, ...] = LENGTHS
    widths: tuple[int, ...] = WIDTHS
    batch: int = 2
    heads: int = 16
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    flex: bool = True
    seconds: float = 240.0
    workers: int = 0  # processes that compile kernels in advance; 0: kernels are compiled when they are measured


ON_CPU = Options(lengths=(4096,), widths=(64,), batch=1, heads=4, device="cpu", dtype=torch.float32)


@dataclass
class SparseRow(Row):
    """One mask at one size. Times in ms; None if not measured, and `notes` has the reason.

    Names that end in `_both` are for forward + backward, the others for forward.
    """

    name: str
    mask: str
    length: int
    width: int
    batch: int
    heads: int
    density: float = 0.0
    computed: float = 0.0  # fraction of all pairs that is computed
    plan_ms: float = 0.0  # plan of the forward pass, by queries
    plan_keys_ms: float = 0.0  # plan of the backward pass, by keys
    plan_bytes: int = 0
    dense: float | None = None
    dense_both: float | None = None
    flex: float | None = None
    flex_both: float | None = None
    sparse: float | None = None
    sparse_both: float | None = None
    host: float | None = None  # host time of a sparse forward pass
    peak_bytes: int | None = None  # peak memory of sparse forward + backward, without the inputs
    target: float | None = None  # largest acceptable `fraction`
    target_both: float | None = None
    notes: str = ""

    @property
    def fraction(self) -> float | None:
        """Sparse time over dense time, forward."""
        return _ratio(self.sparse, self.dense)

    @property
    def fraction_both(self) -> float | None:
        """Sparse time over dense time, forward + backward."""
        return _ratio(self.sparse_both, self.dense_both)

    @property
    def of_ideal(self) -> float | None:
        """Ideal time (density times dense time) over sparse time; 1 is ideal."""
        return None if self.sparse is None or self.dense is None else self.density * self.dense / self.sparse


def _ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None if a value is missing."""
    return None if a is None or not b else a / b


@dataclass(frozen=True)
class Job:
    """One row to measure, with or without FlexAttention."""

    pattern: Pattern
    length: int
    width: int
    flex: bool

    @property
    def key(self) -> Key:
        """Identify the row: name of the pattern, length, width."""
        return self.pattern.name, self.length, self.width


def measure(
    options: Options,
    out: Path | None = None,
    on_row: Callable[[SparseRow], None] = lambda row: None,
    earlier: Iterable[SparseRow] = (),
) -> list[SparseRow]:
    """Measure missing rows until the time limit and add them to the `earlier` rows; write all to `out` after each."""
    deadline = time.monotonic() + options.seconds
    rows = {(row.name, row.length, row.width): row for row in earlier}
    measured: set[Key] = set()  # by this run: FlexAttention may be added to these rows later
    dense: dict[tuple[int, int], tuple[float, float]] = {}
    for stage in stages(options):
        missing = [job for job in stage if not has_result(rows.get(job.key), job.flex)]
        if options.workers and any(job.flex for job in missing):
            done = compile_ahead(options, missing, (deadline - time.monotonic()) / 2)
            # Kernels whose compilation did not finish in time come last.
            missing.sort(key=lambda job: job.key not in done)
        for job in missing:
            if time.monotonic() > deadline:
                return list(rows.values())
            tensors = tensors_for(options, job.length, job.width)
            if job.key not in measured:
                size = (job.length, job.width)
                dense[size] = dense.get(size) or _dense_times(tensors)
                rows[job.key] = _measure_row(job.pattern, tensors, dense[size])
                measured.add(job.key)
            if job.flex and time.monotonic() < deadline:
                _add_flex(rows[job.key], job.pattern, tensors)
            on_row(rows[job.key])
            if out is not None:
                write(out, list(rows.values()))
    return list(rows.values())


def stages(options: Options) -> list[list[Job]]:
    """Return jobs in order: first the size with targets, without and with FlexAttention; then the other sizes.

    FlexAttention is separate because compiling it takes most of the time.
    """
    sizes = [(length, width) for width in options.widths for length in options.lengths]
    job_lists = []
    for group in (sizes[:1], sizes[1:]):
        jobs = [Job(pattern, *size, False) for size in group for pattern in CATALOGUE]
        job_lists.append(jobs)
        if options.flex and options.device != "cpu":
            job_lists.append([replace(job, flex=True) for job in jobs])
    return job_lists


def has_result(row: SparseRow | None, flex: bool) -> bool:
    """Return whether a row needs no further measurement; failed rows are not repeated."""
    if row is None or (row.sparse_both is None and not row.notes):
        return False
    return not flex or row.flex_both is not None or "flex:" in row.notes


def tensors_for(options: Options, length: int, width: int) -> Inputs:
    """Return random queries, keys, values and output gradient."""
    shape = (options.batch if length <= 32768 else 1, options.heads, length, width)
    device_kwargs: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    generator = torch.Generator(options.device).manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=generator, **device_kwargs) for _ in range(4))
    return q, k, v, grad


def _measure_row(pattern: Pattern, tensors: Inputs, dense: tuple[float, float]) -> SparseRow:
    """Measure the plan and sparse attention of one mask."""
    q, k, v, _ = tensors
    B, H, T, D = q.shape
    mask = pattern.mask(T)
    row = SparseRow(pattern.name, str(mask), T, D, B, H, dense=dense[0], dense_both=dense[1])
    if D == 64 and T == 16384:
        row.target, row.target_both = pattern.forward, pattern.both
    mask_plan = _plan(AttentionInputs(q, k, v, mask, ScaledDot(), Softmax(), None, 0), row)
    row.density, row.computed = mask.density(T), mask_plan.density
    try:
        row.sparse, row.sparse_both, row.host, row.peak_bytes = _sparse_times(mask, tensors)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        row.notes = f"sparse: {str(error)[:200]}"
    return row


def _add_flex(row: SparseRow, pattern: Pattern, tensors: Inputs) -> None:
    """Add the times of FlexAttention to a row."""
    try:
        call = flex_attention_under(pattern.mask(row.length), row.length, tensors[0].device)
        row.flex, row.flex_both = time_forward(call, tensors), time_both(call, tensors)
    except Exception as error:  # the compiler may raise anything; the row is kept
        row.notes += f" flex: {type(error).__name__} {str(error)[:120]}"


def _plan(call: AttentionInputs, row: SparseRow, repeats: int = 3) -> Plan:
    """Plan both passes and store the minimum times, because other work on the host can only add time."""
    plans: list[Plan] = []

    def queries() -> None:
        clear_caches()
        plans.append(kernel.plan_for(call))
        _ = plans[-1].query_pieces

    sides = [(seconds(queries), seconds(lambda: call.q.is_cuda and plans[-1].key_pieces)) for _ in range(repeats)]
    row.plan_ms, row.plan_keys_ms = (1e3 * min(times) for times in zip(*sides, strict=True))
    row.plan_bytes = plans[-1].nbytes
    return plans[-1]


def _dense_times(tensors: Inputs) -> tuple[float, float]:
    """Time attention without a mask, forward and forward + backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.CUDNN_ATTENTION] if tensors[0].is_cuda else [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends):
        return time_forward(F.scaled_dot_product_attention, tensors), time_both(F.scaled_dot_product_attention, tensors)


def _sparse_times(mask: Mask, tensors: Inputs) -> tuple[float, float, float | None, int | None]:
    """Return forward time, forward + backward time, host time of forward, and peak memory without the inputs."""
    call = attend_under(mask)
    forward = time_forward(call, tensors)
    if not tensors[0].is_cuda:
        return forward, time_both(call, tensors), None, None
    host = _host_time(lambda: call(*tensors[:3]))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both = time_both(call, tensors)
    return forward, both, host, torch.cuda.max_memory_allocated() - before


def attend_under(mask: Mask, impl: Impl | None = None) -> Attention:
    """Return `attend` with `impl`, by default sparse, or sdpa for causal() alone."""
    return partial(attend, mask=mask, impl=impl or ("sdpa" if isinstance(mask, Causal) else "sparse"))


def time_forward(call: Attention, tensors: Inputs, statistic: Statistic = median) -> float:
    """Return the milliseconds of a forward pass."""
    q, k, v, _ = tensors
    return milliseconds(lambda: call(q, k, v), q.is_cuda, pick=statistic)


def time_both(call: Attention, tensors: Inputs, statistic: Statistic = median) -> float:
    """Return the milliseconds of a forward and a backward pass."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]

    def step() -> None:
        call(*leaves).backward(tensors[3])
        for x in leaves:
            x.grad = None

    return milliseconds(step, tensors[0].is_cuda, pick=statistic)


def _host_time(call: Callable[[], object], repeats: int = 11) -> float:
    """Return the median of the milliseconds until the call returns; the device has not finished then."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def line(row: SparseRow) -> str:
    """Format a row for the terminal."""

    def cell(fraction: float | None) -> str:
        return "      –" if fraction is None else f"{fraction:7.3f}"

    return (
        f"{row.name:28} T {row.length:6} D {row.width:3} density {row.density:.4f} computed {row.computed:.4f} | "
        f"sparse {cell(row.fraction)} {cell(row.fraction_both)} | "
        f"flex {cell(_ratio(row.flex, row.dense))} {cell(_ratio(row.flex_both, row.dense_both))} | "
        f"plan {row.plan_ms:.0f}+{row.plan_keys_ms:.0f} ms {row.notes}"
    )


def read_rows(path: Path) -> list[SparseRow]:
    """Return the rows of an earlier run; raise StorageError if it was measured on another kind of machine."""
    with reading(path, "results", "expected a file that `python -m benchmarks sparse --out` wrote"):
        document = json.loads(path.read_text(encoding="utf-8"))
        names = {field.name for field in fields(SparseRow)}
        rows = [SparseRow(**{name: row[name] for name in names & row.keys()}) for row in document["rows"]]
        device, this_device = document["machine"]["gpu"] or "a CPU", machine()["gpu"] or "a CPU"
    if device != this_device:
        raise StorageError(f"{path} was measured on {device}, not on {this_device}; write to a new file")
    return rows


def options_for(device: str, *, smoke: bool, flex: bool, seconds: float) -> Options:
    """Return one short length in float32 for a CPU, and all lengths in bfloat16 for a GPU."""
    if device == "cpu":
        return replace(ON_CPU, flex=flex, seconds=seconds)
    sizes: dict[str, Any] = {"lengths": LENGTHS[:1], "widths": WIDTHS[:1]} if smoke else {}
    return Options(device=device, flex=flex, seconds=seconds, workers=max(0, (os.cpu_count() or 1) - 2), **sizes)


# ---------------------------------------------------------------------- plot of a results file


@plot_style()
def draw_sparse(results: Path, path: Path) -> Path:
    """Plot relative time against density to a PNG or SVG file: a panel per size in two columns, with the ideal time."""
    with reading(results, "results", f"write it with `python -m benchmarks sparse --out {results}`"):
        rows = [row for row in json.loads(results.read_text(encoding="utf-8"))["rows"] if dict(row).get("fraction")]
    if not rows:
        raise StorageError(
            f"{results} has no measured row; write it with `python -m benchmarks sparse --out {results}`"
        )
    sizes = list(dict.fromkeys((row["length"], row["width"]) for row in rows))
    n_columns = min(2, len(sizes))
    n_rows = -(-len(sizes) // n_columns)
    figure = new_figure(4.6 * n_columns, 3.4 * n_rows)
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for axes, size in zip(panels, sizes, strict=False):
        _panel(axes, [row for row in rows if (row["length"], row["width"]) == size], size)
    for unused in panels[len(sizes) :]:
        unused.set_axis_off()
    panels[0].legend(fontsize="small")
    return save_figure(figure, path)


def _panel(axes: Any, rows: list[dict[str, Any]], size: tuple[int, int]) -> None:
    """Draw the rows of one size."""
    least = min(row["density"] for row in rows) / 2
    axes.plot([least, 1], [least, 1], color="0.6", linewidth=1, label="time proportional to density")
    for key, label, mark in (("fraction", "forward", "o"), ("fraction_both", "forward + backward", "s")):
        points = [(row["density"], row[key]) for row in rows if row.get(key)]
        axes.plot(*zip(*points, strict=True), mark, alpha=0.8, label=label)
    flex = [(row["density"], row["flex"] / row["dense"]) for row in rows if row.get("flex")]
    if flex:
        axes.plot(*zip(*flex, strict=True), "x", color="0.3", label="FlexAttention, forward")
    axes.set(xscale="log", yscale="log", title=f"{size[0]:,} tokens, head dim {size[1]}")
    axes.set(xlabel="density (share of allowed pairs)", ylabel="time / time without a mask")
    axes.grid(alpha=0.3)
