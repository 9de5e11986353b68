"""Measure a device and fit the constants of the attention cost model, which `impl="auto"` uses.

    python tools/calibrate.py --device cuda --seconds 150 --out rates.json     measure, fit, keep the samples
    python tools/calibrate.py --samples rates.json                             fit again, anywhere
    python tools/calibrate.py --auto auto.json --sparse sparse.json            by rows of `python -m benchmarks`
    python tools/calibrate.py --host                                           measure host times of short calls

It prints the constants as source code, to be pasted into the cost model, and for each mask the time that `impl="auto"`
would lose with them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.sparse import time_both, time_forward
from clearhead.attention.attend import attend
from clearhead.attention.observe import Impl
from clearhead.attention.sparse.cost_model import H200, AttentionWork, KernelCosts, PairCost, Rates, rates_for
from clearhead.attention.sparse.kernel import blocking_on
from clearhead.attention.sparse.plan import Plan, plan
from clearhead.masks import Mask, causal, documents, every, prefix, window
from clearhead.masks.catalogue import CATALOGUE

KINDS = ("dense", "masked", "full", "partial")
# Other fields of `AttentionWork`, and the rate that each is multiplied by.
FIXED = {"launches": "launch", "leaves": "leaf", "scattered": "scattered", "moved": "moved"}


@dataclass(frozen=True)
class Sample:
    """One measured call, in ms, and its work."""

    name: str
    width: int
    training: bool  # forward and backward
    ms: float
    work: AttentionWork


# -- the fit ----------------------------------------------------------------------------------------------------------


def fit(samples: Sequence[Sample], device: Rates) -> Rates:
    """Return the device with non-negative costs fitted to the samples by relative error."""
    forward, training = ([s for s in samples if s.training is training] for training in (False, True))
    return replace(device, forward=_fit(forward, device.forward), training=_fit(training, device.training))


def _fit(samples: Sequence[Sample], costs: KernelCosts) -> KernelCosts:
    """Return the costs with fitted device times; host times and the kernel of row intervals are kept."""
    rows = [
        [
            *(x for kind in KINDS for x in (getattr(s.work, kind) / 1e9, getattr(s.work, kind) * s.width / 1e9)),
            *(getattr(s.work, name) for name in FIXED),
        ]
        for s in samples
    ]
    times = torch.tensor([[s.ms] for s in samples], dtype=torch.float64)
    # Dividing each row by its time makes errors relative: every target is 1.
    table = torch.tensor(rows, dtype=torch.float64).reshape(len(samples), 2 * len(KINDS) + len(FIXED)) / times
    if len({s.width for s in samples}) < 2:
        table[:, 0 : 2 * len(KINDS) : 2] = 0.0  # one width cannot separate costs per pair from costs per width
    coefficients = robust(table, torch.ones(len(samples), dtype=torch.float64)).tolist()
    pairs: dict[str, Any] = {
        kind: PairCost(coefficients[2 * n], coefficients[2 * n + 1]) for n, kind in enumerate(KINDS)
    }
    return replace(costs, **pairs, **dict(zip(FIXED.values(), coefficients[2 * len(KINDS) :], strict=True)))


def robust(table: Tensor, target: Tensor, rounds: int = 8) -> Tensor:
    """Return x ≥ 0 with approximately minimal Σ |table · x − target|, so that disturbed measurements count little."""
    weight = torch.ones_like(target)
    x = non_negative(table, target)
    for _ in range(rounds):
        weight = 1 / (table @ x - target).abs().clamp(min=0.03).sqrt()
        x = non_negative(table * weight[:, None], target * weight)
    return x


def non_negative(table: Tensor, target: Tensor) -> Tensor:
    """Return x ≥ 0 with minimal |table · x − target|²; columns may differ in scale by orders of magnitude."""
    from scipy.optimize import nnls

    scale = table.abs().amax(0).clamp(min=torch.finfo(table.dtype).tiny)
    return torch.from_numpy(nnls((table / scale).numpy(), target.numpy())[0]) / scale


# -- samples ----------------------------------------------------------------------------------------------------------


def measure(device: str, lengths: Sequence[int], widths: Sequence[int], heads: int, seconds: float) -> Iterator[Sample]:
    """Measure dense and masked fused calls, and sparse calls of every catalogue mask, until the time limit."""
    deadline = time.monotonic() + seconds
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for length, width in itertools.product(lengths, widths):
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, heads, length, width)
        q, k, v, grad = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
        tensors = (q, k, v, grad)
        pairs = float(heads * length * length)
        tag = f"T {length} D {width}"
        for training in (False, True):
            ms = _time_ms(None, "sdpa", tensors, training)
            yield Sample(f"dense {tag}", width, training, ms, AttentionWork(dense=pairs, launches=1))
            ms = _time_ms(window(length // 8, length // 8), "sdpa", tensors, training)
            yield Sample(f"masked {tag}", width, training, ms, AttentionWork(masked=pairs, launches=1, leaves=1))
        for pattern in CATALOGUE:
            if time.monotonic() > deadline:
                return
            mask = pattern.mask(length)
            mask_plan = _plan(mask, length, device, dtype, width)
            for training in (False, True):
                ms = _time_ms(mask, "sparse", tensors, training)
                work = mask_plan.work(heads, rates_for(torch.device(device)), training)
                yield Sample(f"{pattern.name} {tag}", width, training, ms, work)


def from_sparse(path: Path) -> Iterator[Sample]:
    """Yield samples from the rows of `python -m benchmarks sparse` on a GPU, with plans rebuilt."""
    dense: set[tuple[int, int]] = set()
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        length, width, heads = row["length"], row["width"], row["batch"] * row["heads"]
        tag = f"T {length} D {width}"
        mask = _mask(row)
        mask_plan = _plan(mask, length, "cuda", torch.bfloat16, width)
        for training, end in ((False, ""), (True, "_both")):
            if (length, width) not in dense:
                pairs = float(heads * length * length)
                yield Sample(
                    f"dense {tag}", width, training, row["dense" + end], AttentionWork(dense=pairs, launches=1)
                )
            if row["sparse" + end] and row["name"] != "causal":  # runs on the fused kernel
                work = mask_plan.work(heads, H200, training)
                yield Sample(f"{row['name']} {tag}", width, training, row["sparse" + end], work)
        dense.add((length, width))


def from_auto(path: Path) -> Iterator[Sample]:
    """Yield samples from the rows of `python -m benchmarks auto` on a GPU, for both implementations of each row."""
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        row = {"width": 64, "dtype": "bfloat16"} | row  # absent from older files
        length, heads, width, training = (row[name] for name in ("length", "heads", "width", "backward"))
        tag = f"{row['name']} T {length} D {width}"
        if row["name"] == "causal":  # runs on the fused kernel
            continue
        mask_plan = _plan(_mask(row), length, "cuda", getattr(torch, row["dtype"]), width)
        yield Sample(tag, width, training, row["sparse"], mask_plan.work(heads, H200, training))
        fused_work = mask_plan.fused_work(heads, torch.device("cuda"))
        yield Sample(f"masked {tag}", width, training, row["sdpa"], fused_work)


def _mask(row: dict[str, Any]) -> Mask:
    return next(pattern.mask(row["length"]) for pattern in CATALOGUE if pattern.name == row["name"])


def _plan(mask: Mask, length: int, device: str, dtype: torch.dtype, width: int) -> Plan:
    return plan(mask, length, blocking=blocking_on(torch.device(device), dtype, width, width))


def _time_ms(mask: Mask | None, impl: Impl, tensors: tuple[Tensor, Tensor, Tensor, Tensor], training: bool) -> float:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask, impl=impl)

    # The minimum on a CPU, because other processes only add time.
    return (time_both if training else time_forward)(run, tensors, median if tensors[0].is_cuda else min)


def measure_host(device: str, calls: int = 100) -> dict[str, tuple[float, float]]:
    """Return host times in ms of short calls, forward and forward + backward, by field of `KernelCosts`.

    Medians of calls that are queued without waiting for the device.
    """
    shape = (1, 2, 256, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)
    ids = torch.arange(256, device=device) // 50
    leaf, leaves = window(60, 60), window(60, 60) | every(32) | prefix(7)

    def time_ms(mask: Callable[[], Mask | None], impl: Impl, training: bool) -> float:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            with torch.set_grad_enabled(training):
                out = attend(q, k, v, mask(), impl=impl)
                if training:
                    torch.autograd.grad(out, (q, k, v), grad)
            times.append(1e3 * (time.perf_counter() - start))
            if len(times) % 10 == 0 and device == "cuda":
                torch.cuda.synchronize()
        return median(times[calls // 5 :])

    def both(mask: Callable[[], Mask | None], impl: Impl) -> tuple[float, float]:
        return time_ms(mask, impl, False), time_ms(mask, impl, True)

    plain, one_leaf, three_leaves = both(lambda: None, "sdpa"), both(lambda: leaf, "sdpa"), both(lambda: leaves, "sdpa")
    per_leaf = (three_leaves[0] - one_leaf[0]) / 2, (three_leaves[1] - one_leaf[1]) / 2
    return {
        "sdpa_host": (max(plain[0], one_leaf[0] - per_leaf[0]), max(plain[1], one_leaf[1] - per_leaf[1])),
        "leaf_host": per_leaf,
        "plan_host": both(lambda: leaves, "sparse"),
        "interval_host": both(lambda: causal() & documents(ids.clone()), "sparse"),
    }


# -- report ---------------------------------------------------------------------------------------------------------


def source(rates: Rates) -> str:
    """Return the constants as Python source."""

    def costs(of: KernelCosts) -> str:
        kinds = "".join(
            f"        {kind}=PairCost({getattr(of, kind).pair:.4g}, {getattr(of, kind).width:.4g}),\n" for kind in KINDS
        )
        fixed = "".join(f"        {name}={getattr(of, name):.3g},\n" for name in FIXED.values())
        return f"    KernelCosts(\n{kinds}{fixed}    ),\n"

    return f'Rates(\n    "{rates.name}",\n{costs(rates.forward)}{costs(rates.training)}    …\n)'


def report(samples: Sequence[Sample], rates: Rates) -> str:
    """Return a table of predicted times, and of the time lost by choosing with them between sdpa and sparse."""
    lines = [f"{'':58} {'ms':>9} {'predicted':>10}   choice (time lost)"]
    fused = {(s.name.removeprefix("masked "), s.training): s for s in samples if s.name.startswith("masked ")}
    for s in samples:
        predicted = _predict(s, rates)
        other = fused.get((s.name, s.training)) or fused.get(("T " + s.name.split(" T ")[-1], s.training))
        choice = ""
        if other is not None and not s.work.masked and not s.name.startswith("dense T"):
            gathers = predicted < _predict(other, rates)
            loss = (s if gathers else other).ms / min(s.ms, other.ms) - 1
            choice = f"{'sparse' if gathers else 'sdpa'} ({100 * loss:.0f} %)"
        name = s.name + ", training" * s.training
        lines.append(f"{name:58} {s.ms:9.2f} {predicted:10.2f}   {choice}")
    return "\n".join(lines)


def _predict(s: Sample, rates: Rates) -> float:
    return rates.milliseconds(s.work, width=s.width, backward=s.training)


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """Merge repeated samples of a call, keeping the minimum time because disturbances only add time."""
    fastest: dict[tuple[str, bool], Sample] = {}
    for sample in samples:
        before = fastest.setdefault((sample.name, sample.training), sample)
        if sample.ms < before.ms:
            fastest[sample.name, sample.training] = replace(before, ms=sample.ms)
    return list(fastest.values())


def _read(path: Path) -> list[Sample]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Sample(**row | {"work": AttentionWork(**row["work"])}) for row in rows]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure a device and fit the cost model's constants.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=Path, nargs="+", default=[])
    parser.add_argument("--sparse", type=Path, nargs="+", default=[])
    parser.add_argument("--auto", type=Path, nargs="+", default=[])
    options = parser.parse_args(arguments)
    if options.host:
        for name, (forward, training) in measure_host(options.device).items():
            print(f"{name}: forward {forward:.3g}, training {training:.3g} ms")
        return
    samples = [sample for path in options.samples for sample in _read(path)]
    samples += [sample for path in options.sparse for sample in from_sparse(path)]
    samples += [sample for path in options.auto for sample in from_auto(path)]
    if not samples:
        cpu = options.device == "cpu"
        lengths = options.lengths or ([512, 1024, 2048, 4096] if cpu else [16384, 4096])
        heads = options.heads or (2 if cpu else 32)
        for sample in measure(options.device, lengths, options.widths, heads, options.seconds):
            print(f"{sample.name + ', training' * sample.training:58} {sample.ms:9.3f}", flush=True)
            samples.append(sample)
            if options.out is not None:
                options.out.write_text(json.dumps([asdict(s) for s in samples], indent=1), encoding="utf-8")
    samples = merged(samples)
    rates = fit(samples, rates_for(torch.device(options.device)))
    print(report(samples, rates))
    print(source(rates))


if __name__ == "__main__":
    main()
