"""What `clearhead cost` makes of its options, and how it tells people: which module, a tree of parts with what each
takes, memory; and what follows for a machine, for several GPUs, for a memory, and for a run here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from clearhead import hub, masks
from clearhead.analysis.cost import AttentionSizes, Cost, Machine, preset
from clearhead.analysis.cost.fit import cost_per_gpu, largest_fit, parse_bandwidth, parse_bytes
from clearhead.analysis.cost.formulas import SymbolicCount
from clearhead.analysis.cost.machine import dtype_name
from clearhead.analysis.cost.predict import build_module, model_builder
from clearhead.analysis.cost.result import PartCost, readable_bytes, readable_count
from clearhead.cli.module_options import import_target
from clearhead.cli.options import parse_dtype, resolve_device
from clearhead.cli.output import console, fits, print_wrapped, table
from clearhead.errors import ConfigError
from clearhead.hub import checkpoint
from clearhead.models import Config


def subject_of(model: str | None, d_model: int | None, n_heads: int | None, others: dict[str, Any]) -> Any:
    """A model's name, or one attention layer by its sizes."""
    if model is not None:
        if d_model is not None or n_heads is not None or any(others.values()):
            raise ConfigError("got a model and the sizes of a layer; give one of them")
        return _named(model)
    if d_model is None or n_heads is None:
        raise ConfigError("give a model, such as base, or the sizes of one attention layer: --d-model 512 --n-heads 8")
    return AttentionSizes(d_model, n_heads, **others)


def _named(name: str) -> Any:
    """What a name stands for: a preset, a folder of a model or a run, a TOML file, package.module:factory."""
    path = Path(name) if name not in hub.names() else hub.BUNDLED_FOLDER / name
    if checkpoint.is_third_party(name):
        return checkpoint.read_config(name)
    if ":" in name and not path.exists():
        return _made(name)
    if path.is_dir():
        files = [path / place for place in ("config.toml", "model/config.toml", "train.toml")]
        path = next((file for file in files if file.exists()), path)
        if path.is_dir():
            raise ConfigError(
                f"{name} has no config.toml and no train.toml; expected the folder of a model or of a run"
            )
    if not path.is_file():
        return preset(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    return Config.from_dict(data["model"] if "type" not in data and "model" in data else data)


def _made(name: str) -> Any:
    """What the factory package.module:factory gives: a module or configuration, or a pair of it and its inputs."""
    factory = import_target(name)
    made: Any = factory if isinstance(factory, nn.Module) or not callable(factory) else build_module(factory)
    made, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return replace(model_builder(made, inputs), label=name)


def how_of(
    dtype: str, train: bool, mask: str | None, impl: str, device: str | None, measure: bool
) -> tuple[dict[str, Any], Machine | None]:
    """What `cost` wants beside the sizes, and the machine whose time is wanted."""
    machine = None if device in (None, "cpu", "cuda") or measure else Machine.read(device or "")
    how = {
        "dtype": parse_dtype(dtype),
        "training": train,
        "mask": None if mask is None else masks.parse(mask),
        "impl": impl,
        # Predictions are for a GPU unless said otherwise; what is measured is measured here.
        "device": machine.device if machine else resolve_device(device) if measure else device or "cuda",
    }
    return how, machine


# ---------------------------------------------------------------------- a model, part by part


def show(found: Cost, name: str, formulas: bool, *, is_layer: bool) -> None:
    sizes = ", ".join(f"{letter}={value:,}" for letter, value in found.sizes.items())
    what = "training step" if found.training else "forward pass"
    dtype = dtype_name(found.dtype)
    print_wrapped(f"{name}, {what}, {dtype}: {sizes}")
    parts = {part.name: part for part in (_products(found) if is_layer else found.parts)}

    def parted(count: Callable[[int], str]) -> Table:
        cells = {path: _cells(part, found, formulas, count) for path, part in (parts | {"": found.total}).items()}
        columns = cells[""].keys()
        rows = [(label, cells.get(path, dict.fromkeys(columns, ""))) for label, path in (*tree(parts), ("total", ""))]
        return table(("part", *columns), [(label, *row.values()) for label, row in rows])

    # All digits, unless only four of each make it a table.
    whole, short = parted(lambda n: f"{n:,}"), parted(readable_count)
    console.print(short if not fits(whole) and fits(short) else whole)
    _show_attention(found)
    console.print()
    memory = [
        (name, readable_bytes(amount.value), *([str(amount.formula)] if formulas else []))
        for name, amount in found.memory.labeled_rows()
        if amount.value
    ]
    console.print(table(("memory", "", *(["formula"] if formulas else [])), memory))
    made_of = ", ".join(
        f"{kind} {readable_bytes(n.value)}" for kind, n in found.memory.peak_breakdown.items() if n.value
    )
    print_wrapped(f"peak: {found.memory.peak_op} ({made_of})")
    in_all = readable_count(found.flops.value)
    print_wrapped(f"most FLOPs: {found.bottleneck} ({in_all} in total); {found.kernel_launches:,} kernel launches")
    if found.recomputed:
        print_wrapped(f"recomputed in backward: {readable_count(found.recomputed.value)} FLOPs")
    for operator, times in found.unknown_ops.items():
        print_wrapped(f"unknown: the FLOPs of {operator}, called {times:,} times; only its bytes are counted")
    if found.unaligned_gemms and found.dtype.itemsize == 2:
        where = ", ".join(found.unaligned_gemms)
        print_wrapped(
            f"{where}: a width is not a multiple of 8, which makes products several times slower on a GPU in {dtype}"
        )
    if formulas and found.no_formula_reason:
        print_wrapped(f"some values have no formula: {found.no_formula_reason}")


def _products(found: Cost) -> list[PartCost]:
    """The parts of one attention layer, with its two products apart, as the equation has them."""
    here, none, rows = {record.path for record in found.log.attention}, SymbolicCount(0), []
    for part in found.parts:
        if part.name in here and part.forward:
            half = replace(part, name="scores", forward=part.forward.divide(2), backward=none)
            rows += [half, replace(half, name="weighted sum", bytes_accessed=none, saved=none)]
        else:
            rows.append(part)
    return rows


def tree(names: Iterable[str]) -> list[tuple[str, str]]:
    """Module paths as an indented tree, each with its label: what a path begins with stands once, above it."""
    whole: dict[str, Any] = {}
    for name in names:
        level = whole
        for step in re.split(r"\.(?!\*)", name):  # blocks.* is one step: all blocks together
            level = level.setdefault(step, {})

    def walk(level: dict[str, Any], above: str, depth: int) -> Iterator[tuple[str, str]]:
        for step, inner in level.items():
            path = f"{above}.{step}" if above else step
            yield "  " * depth + step, path
            yield from walk(inner, path, depth + 1)

    return list(walk(whole, "", 0))


def _cells(part: PartCost, found: Cost, formulas: bool, count: Callable[[int], str]) -> dict[str, str]:
    """A row of the table, by its columns; what is nothing is left empty."""

    def told(amount: SymbolicCount, how: Callable[[int], str]) -> str:
        return how(amount.value) if amount.value else ""

    share = part.forward.value / max(1, found.forward.value)
    cells = {"parameters": told(part.parameters, count)}
    cells["forward FLOPs" if found.training else "FLOPs"] = told(part.forward, count)
    cells["share"] = f"{100 * share:.1f} %" if share else ""
    if found.training:
        cells |= {"backward FLOPs": told(part.backward, count), "saved": told(part.saved, readable_bytes)}
    cells["accessed"] = told(part.bytes_accessed, readable_bytes)
    if formulas:
        cells["formula"] = str((part.forward or part.parameters).formula)
    return cells


def _show_attention(found: Cost) -> None:
    """Pairs of queries and keys: all there are, those allowed, and those computed."""
    pairs = found.pairs
    if pairs is None:
        return
    console.print()
    dense = pairs.dense.value
    print_wrapped(f"{dense:,} attention weights a head, {dense * pairs.record.heads:,} in all heads of a layer")
    if pairs.mask is not None:
        how = "by the equation" if found.impl == "reference" else "by the fused kernel"
        print_wrapped(
            f"{pairs.mask}: {pairs.allowed.value:,} pairs allowed ({100 * pairs.allowed.value / dense:.1f} %), "
            f"{pairs.planned:,} by its plan ({100 * pairs.planned / dense:.1f} %), "
            f"{pairs.computed.value:,} computed, {'by that plan' if pairs.runs_plan else how}"
        )


# ---------------------------------------------------------------------- a machine, several GPUs, a memory, a run here


def time_of(found: Cost, machine: Machine) -> dict[str, Any]:
    time = found.time(machine)
    parts = found.ceilings(machine).items()
    return {
        "machine": machine.name,
        "seconds": time.seconds,
        "bottleneck": time.bottleneck,
        "host_wait": time.host_wait,
        "parts": [{"part": name, "seconds": s, "ceiling": ceiling} for name, (s, ceiling) in parts],
    }


def show_time(found: dict[str, Any]) -> None:
    whole = found["seconds"]
    parts = {
        part["part"]: (f"{1e3 * part['seconds']:.3f} ms", f"{100 * part['seconds'] / whole:.1f} %", part["ceiling"])
        for part in found["parts"]
    }
    rows = [(label, *parts.get(path, ("", "", ""))) for label, path in tree(parts)]
    rows.append(("total", f"{1e3 * whole:.3f} ms", "", found["bottleneck"]))
    console.print(table((found["machine"], "predicted", "share", "bound by"), rows))
    if found["host_wait"]:
        print_wrapped(f"{1e3 * found['host_wait']:.3f} ms of this time the device waits for its host")


def share_of(
    found: Cost, gpus: int | None, parallel: str | None, interconnect: str | None, machine: Machine | None
) -> dict[str, Any]:
    if gpus is None or parallel is None:
        raise ConfigError("--gpus and --parallel go together, such as --gpus 64 --parallel fsdp")
    if interconnect is not None and machine is None:
        raise ConfigError("--interconnect needs a machine; add --device h200, or a file written with --save-machine")
    bandwidth = None if interconnect is None else parse_bandwidth(interconnect)
    return asdict(cost_per_gpu(found, gpus, parallel, machine=machine, interconnect=bandwidth))


def show_share(found: dict[str, Any]) -> None:
    kinds = ("parameters", "gradients", "optimizer", "gathered", "peak", "sent")
    rows = [(kind, readable_bytes(found[kind])) for kind in kinds]
    console.print(table((f"each of {found['gpus']} GPUs, {found['parallel']}", "in one step"), rows))
    if found["seconds"] is not None:
        hidden = found["compute_seconds"] + found["communication_seconds"] - found["seconds"]
        print_wrapped(
            f"step: {1e3 * found['seconds']:.2f} ms ({1e3 * found['compute_seconds']:.2f} ms computation, "
            f"{1e3 * found['communication_seconds']:.2f} ms communication, of which {1e3 * hidden:.2f} ms overlap)"
        )


def fit_of(subject: Any, limit: str, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    found = largest_fit(subject, parse_bytes(limit), tokens=tokens, batch=batch, **how)
    batches = {"memory_limit": found.memory_limit, "tokens": tokens, "max_batch": found.max_batch, "batch": batch}
    return batches | {"max_tokens": found.max_tokens, "is_model_limit": found.is_model_limit}


def show_fit(found: dict[str, Any]) -> None:
    size = "" if found["tokens"] is None else f" of {found['tokens']} tokens"
    print_wrapped(f"in {readable_bytes(found['memory_limit'])}: a batch of up to {found['max_batch']:,}{size}")
    if found["max_tokens"] is not None:
        end = ", the limit of the model" if found["is_model_limit"] else ""
        print_wrapped(f"   or, at a batch of {found['batch']:,}, up to {found['max_tokens']:,} tokens{end}")


def measured(subject: Any, found: Cost, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    from clearhead.analysis.cost.measure import compare_with_measured, measure, measure_this_machine

    machine = measure_this_machine(how["device"], (how["dtype"],))
    real = measure(subject, tokens=tokens, batch=batch, **how)
    return {"machine": machine.to_dict(), **compare_with_measured(found, machine, asdict(real))}


def show_measured(found: dict[str, Any]) -> None:
    sides = (found["predicted"], found["measured"])
    peaks = [readable_bytes(side["peak_bytes"]) for side in sides]
    times = [f"{1e3 * side['seconds']:.2f} ms" for side in sides]
    ratio = found["ratio"]
    rows = [("peak memory", *peaks, f"{ratio['memory']:.3f}"), ("time", *times, f"{ratio['time']:.3f}")]
    console.print(table((found["machine"]["name"], "predicted", "measured", "ratio"), rows))


SHOWN = {"time": show_time, "per_gpu": show_share, "memory_limit": show_fit, "measured": show_measured}
