"""Output of `clearhead cost`.

The output is a tree of parts with the cost of each, and memory; the predictions for a machine, several GPUs and a
memory limit; and the comparison with a measured run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from rich.table import Table

from clearhead._core.json_types import JSONObject
from clearhead.analysis.cost import Cost, Machine
from clearhead.analysis.cost.fit import MemoryFit, PerGPUCost, cost_per_gpu, parse_bandwidth
from clearhead.analysis.cost.formulas import SymbolicCount
from clearhead.analysis.cost.machine import dtype_name
from clearhead.analysis.cost.quantities import PartCost, readable_bytes, readable_count
from clearhead.cli.cost_query import CostQuery
from clearhead.cli.output import console, fits, print_wrapped, table
from clearhead.errors import ConfigError

# ---------------------------------------------------------------------- a model, part by part


def show(cost: Cost, name: str, formulas: bool, *, is_layer: bool) -> None:
    """Print the cost of every part, memory and bottlenecks."""
    sizes = ", ".join(f"{letter}={value:,}" for letter, value in cost.sizes.items())
    pass_name = "training step" if cost.training else "forward pass"
    dtype = dtype_name(cost.dtype)
    print_wrapped(f"{name}, {pass_name}, {dtype}: {sizes}")
    parts = {part.name: part for part in (_split_products(cost) if is_layer else cost.parts)}

    def parts_table(count: Callable[[int], str]) -> Table:
        cells = {path: _cells(part, cost, formulas, count) for path, part in (parts | {"": cost.total}).items()}
        columns = cells[""].keys()
        rows = [(label, cells.get(path, dict.fromkeys(columns, ""))) for label, path in (*tree(parts), ("total", ""))]
        return table(("part", *columns), [(label, *row.values()) for label, row in rows])

    # Print all digits, unless the table fits the terminal only with rounded counts.
    exact_table = parts_table(lambda n: f"{n:,}")
    rounded_table = parts_table(readable_count)
    console.print(rounded_table if not fits(exact_table) and fits(rounded_table) else exact_table)
    _show_attention(cost)
    console.print()
    memory = [
        (name, readable_bytes(amount.value), *([str(amount.formula)] if formulas else []))
        for name, amount in cost.memory.labeled_rows()
        if amount.value
    ]
    console.print(table(("memory", "", *(["formula"] if formulas else [])), memory))
    breakdown = ", ".join(
        f"{kind} {readable_bytes(n.value)}" for kind, n in cost.memory.peak_breakdown.items() if n.value
    )
    print_wrapped(f"peak: {cost.memory.peak_op} ({breakdown})")
    total_flops = readable_count(cost.flops.value)
    print_wrapped(f"most FLOPs: {cost.bottleneck} ({total_flops} in total); {cost.kernel_launches:,} kernel launches")
    if cost.recomputed:
        print_wrapped(f"recomputed in backward: {readable_count(cost.recomputed.value)} FLOPs")
    for operator, times in cost.unknown_ops.items():
        print_wrapped(f"unknown FLOPs: {operator}, called {times:,} times; only its bytes are counted")
    if cost.unaligned_gemms and cost.dtype.itemsize == 2:
        names = ", ".join(cost.unaligned_gemms)
        print_wrapped(
            f"{names}: a width is not a multiple of 8, so matrix products in {dtype} are several times slower on a GPU"
        )
    if formulas and cost.no_formula_reason:
        print_wrapped(f"some values have no formula: {cost.no_formula_reason}")


def _split_products(cost: Cost) -> list[PartCost]:
    """Return the parts of one attention layer, with its two matrix products as separate parts."""
    attention_paths = {record.path for record in cost.log.attention}
    zero = SymbolicCount(0)
    rows: list[PartCost] = []
    for part in cost.parts:
        if part.name in attention_paths and part.forward:
            half = replace(part, name="scores", forward=part.forward.divide(2), backward=zero)
            rows += [half, replace(half, name="weighted sum", bytes_accessed=zero, saved=zero)]
        else:
            rows.append(part)
    return rows


def tree(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (label, path) of every node of the tree of module paths; labels are indented by depth."""
    nodes: dict[tuple[str, ...], None] = {}
    for name in names:
        parts = tuple(re.split(r"\.(?!\*)", name))  # "blocks.*" is one node: all blocks together
        nodes |= dict.fromkeys(parts[: depth + 1] for depth in range(len(parts)))

    def walk(parent: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for node in nodes:
            if node[:-1] == parent:
                yield "  " * len(parent) + node[-1], ".".join(node)
                yield from walk(node)

    return list(walk(()))


def _cells(part: PartCost, cost: Cost, formulas: bool, count: Callable[[int], str]) -> dict[str, str]:
    """Return a row of the table by column; zeros are left empty."""

    def cell(amount: SymbolicCount, write: Callable[[int], str]) -> str:
        return write(amount.value) if amount.value else ""

    share = part.forward.value / max(1, cost.forward.value)
    cells = {"parameters": cell(part.parameters, count)}
    cells["forward FLOPs" if cost.training else "FLOPs"] = cell(part.forward, count)
    cells["share"] = f"{100 * share:.1f} %" if share else ""
    if cost.training:
        cells |= {"backward FLOPs": cell(part.backward, count), "saved": cell(part.saved, readable_bytes)}
    cells["accessed"] = cell(part.bytes_accessed, readable_bytes)
    if formulas:
        cells["formula"] = str((part.forward or part.parameters).formula)
    return cells


def _show_attention(cost: Cost) -> None:
    """Print the number of query-key pairs: all, allowed, and computed."""
    pairs = cost.pairs
    if pairs is None:
        return
    console.print()
    dense = pairs.dense.value
    print_wrapped(f"{dense:,} attention weights per head, {dense * pairs.record.heads:,} per layer")
    if pairs.mask is not None:
        implementation = "by the reference" if cost.impl == "reference" else "by the fused kernel"
        print_wrapped(
            f"{pairs.mask}: {pairs.allowed.value:,} pairs allowed ({100 * pairs.allowed.value / dense:.1f} %), "
            f"{pairs.planned:,} by its plan ({100 * pairs.planned / dense:.1f} %), "
            f"{pairs.computed.value:,} computed, {'by that plan' if pairs.runs_plan else implementation}"
        )


# ---------------------------------------------------------------------- machine, several GPUs, memory limit, measured


@runtime_checkable
class CostSection(Protocol):
    """A part of the output: `key` is its name in the JSON document."""

    key: ClassVar[str]

    def to_dict(self) -> JSONObject:
        """Return it as JSON data."""

    def show(self) -> None:
        """Print it."""


@dataclass(frozen=True)
class TimeSection:
    """The time on a machine, and that of every part."""

    key: ClassVar[str] = "time"
    cost: Cost
    machine: Machine

    def to_dict(self) -> JSONObject:
        time = self.cost.time(self.machine)
        parts = self.cost.ceilings(self.machine).items()
        return {
            "machine": self.machine.name,
            "seconds": time.seconds,
            "bottleneck": time.bottleneck,
            "host_wait": time.host_wait,
            "parts": [{"part": name, "seconds": s, "ceiling": ceiling} for name, (s, ceiling) in parts],
        }

    def show(self) -> None:
        time = self.cost.time(self.machine)
        parts = {
            name: (f"{1e3 * seconds:.3f} ms", f"{100 * seconds / time.seconds:.1f} %", ceiling)
            for name, (seconds, ceiling) in self.cost.ceilings(self.machine).items()
        }
        rows = [(label, *parts.get(path, ("", "", ""))) for label, path in tree(parts)]
        rows.append(("total", f"{1e3 * time.seconds:.3f} ms", "", time.bottleneck))
        console.print(table((self.machine.name, "predicted", "share", "bound by"), rows))
        if time.host_wait:
            print_wrapped(f"{1e3 * time.host_wait:.3f} ms of this time is the device waiting for the host")


@dataclass(frozen=True)
class PerGPUSection:
    """Memory, communication and time of one of several GPUs."""

    key: ClassVar[str] = "per_gpu"
    cost: PerGPUCost

    @classmethod
    def predict(
        cls, cost: Cost, gpus: int | None, parallel: str | None, interconnect: str | None, machine: Machine | None
    ) -> PerGPUSection:
        """Return the section for these options."""
        if gpus is None or parallel is None:
            raise ConfigError(
                "the cost per GPU needs --gpus and --parallel; give both, such as --gpus 64 --parallel fsdp"
            )
        if interconnect is not None and machine is None:
            raise ConfigError(
                "--interconnect needs a machine; add --device h200, or a file written with --save-machine"
            )
        bandwidth = None if interconnect is None else parse_bandwidth(interconnect)
        return cls(cost_per_gpu(cost, gpus, parallel, machine=machine, interconnect=bandwidth))

    def to_dict(self) -> JSONObject:
        return asdict(self.cost)

    def show(self) -> None:
        cost = self.cost
        kinds = ("parameters", "gradients", "optimizer", "gathered", "peak", "sent")
        rows = [(kind, readable_bytes(getattr(cost, kind))) for kind in kinds]
        console.print(table((f"each of {cost.gpus} GPUs, {cost.parallel}", "per step"), rows))
        if cost.seconds is None or cost.compute_seconds is None or cost.communication_seconds is None:
            return
        overlap = cost.compute_seconds + cost.communication_seconds - cost.seconds
        print_wrapped(
            f"step: {1e3 * cost.seconds:.2f} ms ({1e3 * cost.compute_seconds:.2f} ms computation, "
            f"{1e3 * cost.communication_seconds:.2f} ms communication, of which {1e3 * overlap:.2f} ms overlap)"
        )


@dataclass(frozen=True)
class FitSection:
    """The largest batch and length within a memory limit."""

    key: ClassVar[str] = "memory_limit"
    query: CostQuery
    fit: MemoryFit

    def to_dict(self) -> JSONObject:
        fit, query = self.fit, self.query
        return {
            "memory_limit": fit.memory_limit,
            "tokens": query.tokens,
            "max_batch": fit.max_batch,
            "batch": query.batch,
            "max_tokens": fit.max_tokens,
            "is_model_limit": fit.is_model_limit,
        }

    def show(self) -> None:
        fit, query = self.fit, self.query
        size = "" if query.tokens is None else f" of {query.tokens} tokens"
        print_wrapped(f"in {readable_bytes(fit.memory_limit)}: a batch of up to {fit.max_batch:,}{size}")
        if fit.max_tokens is not None:
            end = ", the limit of the model" if fit.is_model_limit else ""
            print_wrapped(f"   or, at a batch of {query.batch:,}, up to {fit.max_tokens:,} tokens{end}")


@dataclass(frozen=True)
class MeasuredSection:
    """Prediction and measurement next to each other, and their ratio."""

    key: ClassVar[str] = "measured"
    comparison: dict[str, Any]

    @classmethod
    def measure(cls, query: CostQuery, cost: Cost) -> MeasuredSection:
        """Run the module on this machine and compare."""
        from clearhead.analysis.cost.measure import compare_with_measured, measure_this_machine

        machine = measure_this_machine(query.device, (query.dtype,))
        comparison = compare_with_measured(cost, machine, asdict(query.measure()))
        return cls({"machine": machine.to_dict(), **comparison})

    def to_dict(self) -> JSONObject:
        return self.comparison

    def show(self) -> None:
        sides = (self.comparison["predicted"], self.comparison["measured"])
        peaks = [readable_bytes(side["peak_bytes"]) for side in sides]
        times = [f"{1e3 * side['seconds']:.2f} ms" for side in sides]
        ratio = self.comparison["ratio"]
        rows = [("peak memory", *peaks, f"{ratio['memory']:.3f}"), ("time", *times, f"{ratio['time']:.3f}")]
        console.print(table((self.comparison["machine"]["name"], "predicted", "measured", "ratio"), rows))
