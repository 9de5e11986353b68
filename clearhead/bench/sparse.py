"""`clearhead bench sparse`: what masks cost, as fractions of attention without a mask, measured in one run.

Each row is one mask at one length and width: dense attention (cuDNN on a GPU), FlexAttention compiled for the mask (on a
GPU), and ours, forward and forward + backward. On a GPU the times are the device's own: it has work to do while the calls
are issued, as in a model, and what issuing one takes the host is a column of its own. Rows are written as they are
measured, most important first, so that a run that is cut short loses nothing.

    python -m clearhead.bench.sparse --out sparse.json --seconds 240
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.attention.attend import Impl, attend
from clearhead.attention.kernels import gathered
from clearhead.attention.kernels.call import Call
from clearhead.attention.plan import Plan, forget
from clearhead.attention.scores import ScaledDot
from clearhead.attention.weights import Softmax
from clearhead.bench.results import machine, versions
from clearhead.bench.sparse_masks import CATALOGUE, Pattern
from clearhead.masks import Causal, Mask

LENGTHS = (16384, 4096, 65536, 131072)
WIDTHS = (64, 128)
_HEAD_START = 20_000_000  # cycles of the device, about 10 ms


@dataclass
class Row:
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

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self)
        row["fraction"] = _ratio(self.ours, self.dense)
        row["fraction_both"] = _ratio(self.ours_both, self.dense_both)
        row["of_ideal"] = (
            None if self.ours is None or self.dense is None else self.density * self.dense / self.ours
        )
        return row


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


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


def measure(
    options: Options, out: Path | None = None, on_row: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Every row there is time for; each is written to `out` as soon as it is there."""
    deadline = time.monotonic() + options.seconds
    rows: list[Row] = []
    dense: dict[tuple[int, int], tuple[float, float]] = {}
    for pattern, length, width in _order(options):
        if time.monotonic() > deadline:
            break
        tensors = _tensors(options, length, width)
        if (length, width) not in dense:
            dense[length, width] = _dense_times(tensors)
        row = _measure_row(pattern, tensors, dense[length, width], options, deadline)
        rows.append(row)
        on_row(row)
        if out is not None:
            _write(out, rows)
    return rows


def _order(options: Options) -> Iterator[tuple[Pattern, int, int]]:
    """The targets' size first, then the other widths and lengths."""
    for length in options.lengths:
        for width in options.widths:
            for pattern in CATALOGUE:
                yield pattern, length, width


def _tensors(options: Options, length: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = options.batch if length <= 32768 else 1
    shape = (batch, options.heads, length, width)
    generator = torch.Generator(options.device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(shape, generator=generator, device=options.device, dtype=options.dtype) for _ in range(4)
    )
    return q, k, v, grad


def _measure_row(
    pattern: Pattern,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    dense: tuple[float, float],
    options: Options,
    deadline: float,
) -> Row:
    q, k, v, _ = tensors
    B, H, T, D = q.shape
    mask = pattern.mask(T)
    row = Row(pattern.name, str(mask), T, D, B, H, dense=dense[0], dense_both=dense[1])
    if D == 64 and T == 16384:
        row.wanted, row.wanted_both = pattern.forward, pattern.both
    call = Call(q, k, v, mask, ScaledDot(), Softmax(), None, 0)
    made = _plan(call, row)
    row.density = mask.density(T)
    row.computed = made.density
    try:
        row.ours, row.ours_both, row.host, row.peak_bytes = _ours(mask, tensors)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        row.notes = f"ours: {str(error)[:200]}"
    if options.flex and q.is_cuda and time.monotonic() < deadline:
        try:
            row.flex, row.flex_both = _flex(mask, tensors)
        except Exception as error:  # whatever a compiler raises: the row is still worth keeping
            row.notes += f" flex: {type(error).__name__} {str(error)[:120]}"
    return row


def _plan(call: Call, row: Row) -> Plan:
    forget()
    start = _now(call.q)
    made = gathered.plan_for(call)
    _ = made.queries
    row.plan_ms = _now(call.q) - start
    start = _now(call.q)
    if call.q.is_cuda:
        _ = made.keys
    row.plan_keys_ms = _now(call.q) - start
    row.plan_bytes = made.nbytes
    return made


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() * 1e3


def _dense_times(tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[float, float]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.CUDNN_ATTENTION] if tensors[0].is_cuda else [SDPBackend.FLASH_ATTENTION]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v)

    return _forward(run, tensors), _both(run, tensors)


def _ours(
    mask: Mask, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[float, float, float | None, int | None]:
    """Forward, forward + backward, the host's part of forward, and the peak beyond the inputs."""
    impl: Impl = "fused" if isinstance(mask, Causal) else "gathered"

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask, impl=impl)

    forward = _forward(run, tensors)
    if not tensors[0].is_cuda:
        return forward, _both(run, tensors), None, None
    host = _host_time(lambda: run(*tensors[:3]))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both = _both(run, tensors)
    return forward, both, host, torch.cuda.max_memory_allocated() - before


def _flex(mask: Mask, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """FlexAttention with the mask's own predicate, compiled; the block mask is made before the clock starts."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from clearhead.masks.geometry import Grid

    T = tensors[0].shape[2]

    def predicate(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask._test(q_idx, kv_idx, Grid(T, 0))

    torch._dynamo.reset()  # a graph for every mask; the limit on recompilations is meant for one function
    block_mask = create_block_mask(predicate, None, None, T, T, device=tensors[0].device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask)
        return out

    return _forward(run, tensors), _both(run, tensors)


Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def _forward(run: Run, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
    q, k, v, _ = tensors
    return _time(lambda: run(q, k, v), q.is_cuda)


def _both(run: Run, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]

    def step() -> None:
        run(*leaves).backward(tensors[3])
        for x in leaves:
            x.grad = None

    return _time(step, tensors[0].is_cuda)


def _time(call: Callable[[], object], cuda: bool, repeats: int = 11) -> float:
    """The median in ms, by the device's own clock where there is one."""
    for _ in range(3):
        call()
    if not cuda:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        return median(times)
    # The device sleeps while the first calls are issued: from then on it never waits for the host.
    torch.cuda._sleep(_HEAD_START)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events)


def _host_time(call: Callable[[], object], repeats: int = 11) -> float:
    """The median in ms until the call returns, which is before the device has done its work."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


def _write(out: Path, rows: list[Row]) -> None:
    """Writes all rows so far, whole or not at all."""
    document = {"machine": machine(), "versions": versions(), "rows": [row.to_dict() for row in rows]}
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
    os.replace(temporary, out)


def line(row: Row) -> str:
    """A row for the terminal."""

    def cell(value: float | None, dense: float | None) -> str:
        fraction = _ratio(value, dense)
        return "      –" if fraction is None else f"{fraction:7.3f}"

    return (
        f"{row.name:28} T {row.length:6} D {row.width:3} density {row.density:.4f} computed {row.computed:.4f} | "
        f"ours {cell(row.ours, row.dense)} {cell(row.ours_both, row.dense_both)} | "
        f"flex {cell(row.flex, row.dense)} {cell(row.flex_both, row.dense_both)} | "
        f"plan {row.plan_ms:.0f}+{row.plan_keys_ms:.0f} ms {row.notes}"
    )


def main(arguments: list[str] | None = None) -> None:
    """The command line of this module; `clearhead bench sparse` is the same with tables."""
    parser = argparse.ArgumentParser(description="Masks against dense attention and FlexAttention.")
    parser.add_argument("--out", type=Path, default=Path("sparse.json"))
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--quick", action="store_true", help="16,384 tokens of width 64 only")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args(arguments)
    options = options_for(chosen.device, quick=chosen.quick, flex=not chosen.no_flex, seconds=chosen.seconds)
    measure(options, chosen.out, on_row=lambda row: print(line(row), flush=True))


def options_for(device: str, *, quick: bool, flex: bool, seconds: float) -> Options:
    """What is measured on a device: on a CPU one short length in float32, on a GPU all of them in bfloat16."""
    cpu = device == "cpu"
    return Options(
        lengths=(4096,) if cpu else (16384,) if quick else LENGTHS,
        widths=(64,) if cpu or quick else WIDTHS,
        batch=1 if cpu else 2,
        heads=4 if cpu else 16,
        device=device,
        dtype=torch.float32 if cpu else torch.bfloat16,
        flex=flex,
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
