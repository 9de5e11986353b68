"""`python -m benchmarks sparse`: what masks cost, as fractions of attention without a mask, measured in one run.

Each row is one mask at one length and width: dense attention (cuDNN on a GPU), FlexAttention compiled for the mask (on
a GPU), and ours, forward and forward + backward. On a GPU the times are the device's own: it has work to do while the
calls are issued, as in a model, and what issuing one takes the host is a column of its own. Rows are written as they
are measured, most important first, so that a run that is cut short loses nothing, and another can go on from its file.

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
from benchmarks.sparse_flex import Key, compile_ahead, flex_way
from clearhead._core.plotting import new_figure, save_figure
from clearhead.analysis.cost.timing import milliseconds, seconds
from clearhead.attention.attend import Impl, attend
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel
from clearhead.attention.sparse.plan import Plan
from clearhead.attention.sparse.registry import clear_plans
from clearhead.errors import StorageError
from clearhead.masks import Causal, Mask
from clearhead.masks.catalogue import CATALOGUE, Pattern

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # queries, keys, values, and the gradient of what comes out
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Pick = Callable[[Iterable[float]], float]
LENGTHS = (16384, 131072, 4096, 65536)
WIDTHS = (64, 128)


@dataclass(frozen=True)
class Options:
    """What a run measures: at which sizes, on what, for how long, and with FlexAttention or not."""

    lengths: tuple[int, ...] = LENGTHS
    widths: tuple[int, ...] = WIDTHS
    batch: int = 2
    heads: int = 16
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    flex: bool = True
    seconds: float = 240.0
    workers: int = 0  # processes that compile ahead; 0: kernels are compiled when they are measured


ON_CPU = Options(lengths=(4096,), widths=(64,), batch=1, heads=4, device="cpu", dtype=torch.float32)


@dataclass
class Masked(Row):
    """One mask at one size. Times in ms; None where something was not measured, `notes` say why."""

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


@dataclass(frozen=True)
class Step:
    """One row to measure, with FlexAttention or without."""

    pattern: Pattern
    length: int
    width: int
    flex: bool

    @property
    def key(self) -> Key:
        return self.pattern.name, self.length, self.width


def measure(
    options: Options,
    out: Path | None = None,
    on_row: Callable[[Masked], None] = lambda row: None,
    kept: Iterable[Masked] = (),
) -> list[Masked]:
    """Every row there is time for, beside those `kept` from an earlier run; all are written to `out` after each."""
    deadline = time.monotonic() + options.seconds
    rows = {(row.name, row.length, row.width): row for row in kept}
    mine: set[Key] = set()  # measured by this run, so that FlexAttention may be added later
    dense: dict[tuple[int, int], tuple[float, float]] = {}
    for stage in stages(options):
        missing = [step for step in stage if not _has(rows.get(step.key), step.flex)]
        if options.workers and any(step.flex for step in missing):
            done = compile_ahead(options, missing, (deadline - time.monotonic()) / 2)
            # What a compiler may not get done with comes last.
            missing.sort(key=lambda step: step.key not in done)
        for step in missing:
            if time.monotonic() > deadline:
                return list(rows.values())
            tensors = tensors_for(options, step.length, step.width)
            if step.key not in mine:
                size = (step.length, step.width)
                dense[size] = dense.get(size) or _dense_times(tensors)
                rows[step.key] = _measure_row(step.pattern, tensors, dense[size])
                mine.add(step.key)
            if step.flex and time.monotonic() < deadline:
                _add_flex(rows[step.key], step.pattern, tensors)
            on_row(rows[step.key])
            if out is not None:
                write(out, list(rows.values()))
    return list(rows.values())


def stages(options: Options) -> list[list[Step]]:
    """The targets' size, then with FlexAttention, whose compiler takes most of the time; then the other sizes alike."""
    sizes = [(length, width) for width in options.widths for length in options.lengths]
    found = []
    for some in (sizes[:1], sizes[1:]):
        steps = [Step(pattern, *size, False) for size in some for pattern in CATALOGUE]
        found.append(steps)
        if options.flex and options.device != "cpu":
            found.append([replace(step, flex=True) for step in steps])
    return found


def _has(row: Masked | None, flex: bool) -> bool:
    """Whether a row was measured as far as a step would; what failed is worth no second try with the same code."""
    if row is None or (row.ours_both is None and not row.notes):
        return False
    return not flex or row.flex_both is not None or "flex:" in row.notes


def tensors_for(options: Options, length: int, width: int) -> Inputs:
    shape = (options.batch if length <= 32768 else 1, options.heads, length, width)
    how: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    generator = torch.Generator(options.device).manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=generator, **how) for _ in range(4))
    return q, k, v, grad


def _measure_row(pattern: Pattern, tensors: Inputs, dense: tuple[float, float]) -> Masked:
    q, k, v, _ = tensors
    B, H, T, D = q.shape
    mask = pattern.mask(T)
    row = Masked(pattern.name, str(mask), T, D, B, H, dense=dense[0], dense_both=dense[1])
    if D == 64 and T == 16384:
        row.wanted, row.wanted_both = pattern.forward, pattern.both
    made = _plan(AttentionInputs(q, k, v, mask, ScaledDot(), Softmax(), None, 0), row)
    row.density, row.computed = mask.density(T), made.density
    try:
        row.ours, row.ours_both, row.host, row.peak_bytes = _ours(mask, tensors)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        row.notes = f"ours: {str(error)[:200]}"
    return row


def _add_flex(row: Masked, pattern: Pattern, tensors: Inputs) -> None:
    try:
        run = flex_way(pattern.mask(row.length), row.length, tensors[0].device)
        row.flex, row.flex_both = time_forward(run, tensors), time_both(run, tensors)
    except Exception as error:  # whatever a compiler raises: the row is still worth keeping
        row.notes += f" flex: {type(error).__name__} {str(error)[:120]}"


def _plan(call: AttentionInputs, row: Masked, repeats: int = 3) -> Plan:
    """The plan of both sides; the least of a few times, because whatever else runs on the host only adds."""
    made: list[Plan] = []

    def queries() -> None:
        clear_plans()
        made.append(kernel.plan_for(call))
        _ = made[-1].query_pieces

    sides = [(seconds(queries), seconds(lambda: call.q.is_cuda and made[-1].key_pieces)) for _ in range(repeats)]
    row.plan_ms, row.plan_keys_ms = (1e3 * min(times) for times in zip(*sides, strict=True))
    row.plan_bytes = made[-1].nbytes
    return made[-1]


def _dense_times(tensors: Inputs) -> tuple[float, float]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.CUDNN_ATTENTION] if tensors[0].is_cuda else [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends):
        return time_forward(F.scaled_dot_product_attention, tensors), time_both(F.scaled_dot_product_attention, tensors)


def _ours(mask: Mask, tensors: Inputs) -> tuple[float, float, float | None, int | None]:
    """Forward, forward + backward, the host's part of forward, and the peak beyond the inputs."""
    run = our_way(mask)
    forward = time_forward(run, tensors)
    if not tensors[0].is_cuda:
        return forward, time_both(run, tensors), None, None
    host = _host_time(lambda: run(*tensors[:3]))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both = time_both(run, tensors)
    return forward, both, host, torch.cuda.max_memory_allocated() - before


def our_way(mask: Mask, impl: Impl | None = None) -> Run:
    """Return `attend` with `impl`, by default sparse, or sdpa for causal() alone."""
    return partial(attend, mask=mask, impl=impl or ("sdpa" if isinstance(mask, Causal) else "sparse"))


def time_forward(run: Run, tensors: Inputs, pick: Pick = median) -> float:
    q, k, v, _ = tensors
    return milliseconds(lambda: run(q, k, v), q.is_cuda, pick=pick)


def time_both(run: Run, tensors: Inputs, pick: Pick = median) -> float:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]

    def step() -> None:
        run(*leaves).backward(tensors[3])
        for x in leaves:
            x.grad = None

    return milliseconds(step, tensors[0].is_cuda, pick=pick)


def _host_time(call: Callable[[], object], repeats: int = 11) -> float:
    """The median in ms until the call returns, which is before the device has done its work."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


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
    with reading(path, "results", "go on from a file that `python -m benchmarks sparse --out` wrote"):
        document = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Masked)}
        rows = [Masked(**{name: row[name] for name in known & row.keys()}) for row in document["rows"]]
        device, here = document["machine"]["gpu"] or "a CPU", machine()["gpu"] or "a CPU"
    if device != here:
        raise StorageError(f"{path} was measured on {device}, not on {here}; begin a new file here")
    return rows


def options_for(device: str, *, quick: bool, flex: bool, seconds: float) -> Options:
    """What is measured on a device: on a CPU one short length in float32, on a GPU all of them in bfloat16."""
    if device == "cpu":
        return replace(ON_CPU, flex=flex, seconds=seconds)
    some: dict[str, Any] = {"lengths": LENGTHS[:1], "widths": WIDTHS[:1]} if quick else {}
    return Options(device=device, flex=flex, seconds=seconds, workers=max(0, (os.cpu_count() or 1) - 2), **some)


# ---------------------------------------------------------------------- the picture of a results file


def draw_sparse(results: Path, path: Path) -> Path:
    """Draws the rows of a results file to a PNG or SVG file: a panel for each size, time against density, and the line
    that a mask's density promises."""
    with reading(results, "results", f"write it with `python -m benchmarks sparse --out {results}`"):
        rows = [row for row in json.loads(results.read_text(encoding="utf-8"))["rows"] if dict(row).get("fraction")]
    if not rows:
        raise StorageError(
            f"{results} has no measured row; write it with `python -m benchmarks sparse --out {results}`"
        )
    sizes = list(dict.fromkeys((row["length"], row["width"]) for row in rows))
    figure = new_figure(6.4 * len(sizes), 4.8)
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        _panel(axes, [row for row in rows if (row["length"], row["width"]) == size], size)
    return save_figure(figure, path)


def _panel(axes: Any, rows: list[dict[str, Any]], size: tuple[int, int]) -> None:
    least = min(row["density"] for row in rows) / 2
    axes.plot([least, 1], [least, 1], color="0.6", linewidth=1, label="what the density promises")
    for key, label, mark in (("fraction", "forward", "o"), ("fraction_both", "forward + backward", "s")):
        points = [(row["density"], row[key]) for row in rows if row.get(key)]
        axes.plot(*zip(*points, strict=True), mark, alpha=0.8, label=label)
    others = [(row["density"], row["flex"] / row["dense"]) for row in rows if row.get("flex")]
    if others:
        axes.plot(*zip(*others, strict=True), "x", color="0.3", label="FlexAttention, forward")
    axes.set(xscale="log", yscale="log", title=f"{size[0]:,} tokens, heads of width {size[1]}")
    axes.set(xlabel="density: pairs that the mask allows", ylabel="time / time without a mask")
    axes.grid(alpha=0.3)
    axes.legend()
