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

from clearhead import interop, masks, pretrained
from clearhead.cli.named import imported
from clearhead.cli.options import device_here, dtype_of
from clearhead.cli.output import console, fits, say, table
from clearhead.costs import AttentionSizes, Cost, Machine, preset
from clearhead.costs.fit import bytes_of, fit, link_of, share
from clearhead.costs.formulas import Amount
from clearhead.costs.machine import dtype_name
from clearhead.costs.predict import built, model_of
from clearhead.costs.result import Part, readable_bytes, readable_count
from clearhead.errors import ConfigError
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
    path = Path(name) if name not in pretrained.names() else pretrained.BOX / name
    if interop.is_foreign(name):
        return interop.config_of(name)
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
    factory = imported(name)
    made: Any = factory if isinstance(factory, nn.Module) or not callable(factory) else built(factory)
    made, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return replace(model_of(made, inputs), label=name)


def how_of(
    dtype: str, train: bool, mask: str | None, impl: str, device: str | None, measure: bool
) -> tuple[dict[str, Any], Machine | None]:
    """What `cost` wants beside the sizes, and the machine whose time is wanted."""
    machine = None if device in (None, "cpu", "cuda") or measure else Machine.read(device or "")
    how = {
        "dtype": dtype_of(dtype),
        "training": train,
        "mask": None if mask is None else masks.parse(mask),
        "impl": impl,
        # Predictions are for a GPU unless said otherwise; what is measured is measured here.
        "device": machine.device if machine else device_here(device) if measure else device or "cuda",
    }
    return how, machine


# ---------------------------------------------------------------------- a model, part by part


def show(found: Cost, name: str, formulas: bool, *, is_layer: bool) -> None:
    sizes = ", ".join(f"{letter}={value:,}" for letter, value in found.sizes.items())
    what = "training step" if found.training else "forward pass"
    dtype = dtype_name(found.dtype)
    say(f"{name}, {what}, {dtype}: {sizes}")
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
        for name, amount in found.memory.rows()
        if amount.value
    ]
    console.print(table(("memory", "", *(["formula"] if formulas else [])), memory))
    made_of = ", ".join(f"{kind} {readable_bytes(n.value)}" for kind, n in found.memory.peak_made_of.items() if n.value)
    say(f"peak: {found.memory.peak_when} ({made_of})")
    in_all = readable_count(found.operations.value)
    say(f"most operations: {found.bottleneck} ({in_all} in all); {found.n_launches:,} kernels")
    if found.recomputed:
        say(f"computed again on the way back: {readable_count(found.recomputed.value)} operations")
    for operator, times in found.unknown.items():
        say(f"not known: the operations of {operator}, which ran {times:,} times; its bytes are counted")
    if found.odd_products and found.dtype.itemsize == 2:
        where = ", ".join(found.odd_products)
        say(f"{where}: a width is no multiple of 8, which a GPU multiplies several times more slowly in {dtype}")
    if formulas and found.why_no_formulas:
        say(f"numbers stand where there is no formula: {found.why_no_formulas}")


def _products(found: Cost) -> list[Part]:
    """The parts of one attention layer, with its two products apart, as the equation has them."""
    here, none, rows = {look.path for look in found.log.looks}, Amount(0), []
    for part in found.parts:
        if part.name in here and part.forward:
            half = replace(part, name="scores", forward=part.forward.part(2), backward=none)
            rows += [half, replace(half, name="weighted sum", traffic=none, kept=none)]
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


def _cells(part: Part, found: Cost, formulas: bool, count: Callable[[int], str]) -> dict[str, str]:
    """A row of the table, by its columns; what is nothing is left empty."""

    def told(amount: Amount, how: Callable[[int], str]) -> str:
        return how(amount.value) if amount.value else ""

    share = part.forward.value / max(1, found.forward.value)
    cells = {"parameters": told(part.parameters, count)}
    cells["forward" if found.training else "operations"] = told(part.forward, count)
    cells["share"] = f"{100 * share:.1f} %" if share else ""
    if found.training:
        cells |= {"backward": told(part.backward, count), "kept": told(part.kept, readable_bytes)}
    cells["moved"] = told(part.traffic, readable_bytes)
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
    say(f"{dense:,} attention weights a head, {dense * pairs.look.heads:,} in all heads of a layer")
    if pairs.mask is not None:
        how = "by the equation" if found.impl == "reference" else "by the fused kernel"
        say(
            f"{pairs.mask}: {pairs.allowed.value:,} pairs allowed ({100 * pairs.allowed.value / dense:.1f} %), "
            f"{pairs.planned:,} by its plan ({100 * pairs.planned / dense:.1f} %), "
            f"{pairs.computed.value:,} computed, {'by that plan' if pairs.gathers else how}"
        )


# ---------------------------------------------------------------------- a machine, several GPUs, a memory, a run here


def time_of(found: Cost, machine: Machine) -> dict[str, Any]:
    took, parts = found.time(machine), found.ceilings(machine).items()
    told = {"machine": machine.name, "seconds": took.seconds, "limit": took.limit, "waiting": took.waiting}
    return told | {"parts": [{"part": name, "seconds": s, "ceiling": ceiling} for name, (s, ceiling) in parts]}


def show_time(found: dict[str, Any]) -> None:
    whole = found["seconds"]
    parts = {
        part["part"]: (f"{1e3 * part['seconds']:.3f} ms", f"{100 * part['seconds'] / whole:.1f} %", part["ceiling"])
        for part in found["parts"]
    }
    rows = [(label, *parts.get(path, ("", "", ""))) for label, path in tree(parts)]
    rows.append(("total", f"{1e3 * whole:.3f} ms", "", found["limit"]))
    console.print(table((found["machine"], "predicted", "share", "bound by"), rows))
    if found["waiting"]:
        say(f"{1e3 * found['waiting']:.3f} ms of it the device waits for its host")


def share_of(
    found: Cost, gpus: int | None, parallel: str | None, link: str | None, machine: Machine | None
) -> dict[str, Any]:
    if gpus is None or parallel is None:
        raise ConfigError("--gpus and --parallel go together, such as --gpus 64 --parallel fsdp")
    if link is not None and machine is None:
        raise ConfigError("--link gives a time, which needs a machine: add --device h200, or a file of --machine-out")
    return asdict(share(found, gpus, parallel, machine=machine, link=None if link is None else link_of(link)))


def show_share(found: dict[str, Any]) -> None:
    kinds = ("weights", "gradients", "optimiser", "gathered", "peak", "sent")
    rows = [(kind, readable_bytes(found[kind])) for kind in kinds]
    console.print(table((f"each of {found['gpus']} GPUs, {found['parallel']}", "in one step"), rows))
    if found["seconds"] is not None:
        hidden = found["computing"] + found["sending"] - found["seconds"]
        say(
            f"step: {1e3 * found['seconds']:.2f} ms ({1e3 * found['computing']:.2f} ms computing, "
            f"{1e3 * found['sending']:.2f} ms sending, of which {1e3 * hidden:.2f} ms hide behind computing)"
        )


def fit_of(subject: Any, budget: str, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    found = fit(subject, bytes_of(budget), tokens=tokens, batch=batch, **how)
    batches = {"budget": found.budget, "tokens": tokens, "largest_batch": found.batch, "batch": batch}
    return batches | {"longest": found.tokens, "longest_is_models": found.at_end}


def show_fit(found: dict[str, Any]) -> None:
    size = "" if found["tokens"] is None else f" of {found['tokens']} tokens"
    say(f"in {readable_bytes(found['budget'])}: a batch of up to {found['largest_batch']:,}{size}")
    if found["longest"] is not None:
        end = ", the model's longest" if found["longest_is_models"] else ""
        say(f"   or, at a batch of {found['batch']:,}, up to {found['longest']:,} tokens{end}")


def measured(subject: Any, found: Cost, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    from clearhead.bench.machine import beside, machine_here, measure

    machine = machine_here(how["device"], (how["dtype"],))
    real = measure(subject, tokens=tokens, batch=batch, **how)
    return {"machine": machine.to_dict(), **beside(found, machine, asdict(real))}


def show_measured(found: dict[str, Any]) -> None:
    sides = (found["predicted"], found["measured"])
    peaks = [readable_bytes(side["peak_bytes"]) for side in sides]
    times = [f"{1e3 * side['seconds']:.2f} ms" for side in sides]
    ratio = found["ratio"]
    rows = [("peak memory", *peaks, f"{ratio['memory']:.3f}"), ("time", *times, f"{ratio['time']:.3f}")]
    console.print(table((found["machine"]["name"], "predicted", "measured", "ratio"), rows))


SHOWN = {"time": show_time, "share": show_share, "fit": show_fit, "measure": show_measured}
