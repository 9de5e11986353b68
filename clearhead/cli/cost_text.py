"""How `clearhead cost` speaks to people: a tree of parts with what each takes, memory, and what else was asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from rich.table import Table

from clearhead.cli.output import console, fits, say, table
from clearhead.costs import Cost
from clearhead.costs.formulas import Amount
from clearhead.costs.result import Part, readable_bytes, readable_count


def show(found: Cost, name: str, formulas: bool, *, is_layer: bool) -> None:
    sizes = ", ".join(f"{letter}={value:,}" for letter, value in found.sizes.items())
    what = "training step" if found.training else "forward pass"
    dtype = str(found.dtype).removeprefix("torch.")
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
    if pairs.look.mask is not None:
        how = "by the equation" if found.impl == "reference" else "by the fused kernel"
        say(
            f"{pairs.look.mask}: {pairs.allowed.value:,} pairs allowed ({100 * pairs.allowed.value / dense:.1f} %), "
            f"{pairs.planned:,} by its plan ({100 * pairs.planned / dense:.1f} %), "
            f"{pairs.computed.value:,} computed, {how if pairs.look.plan is None else 'by that plan'}"
        )


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


def show_fit(found: dict[str, Any]) -> None:
    size = "" if found["tokens"] is None else f" of {found['tokens']} tokens"
    say(f"in {readable_bytes(found['budget'])}: a batch of up to {found['largest_batch']:,}{size}")
    if found["longest"] is not None:
        end = ", the model's longest" if found["longest_is_models"] else ""
        say(f"   or, at a batch of {found['batch']:,}, up to {found['longest']:,} tokens{end}")


def show_measured(found: dict[str, Any]) -> None:
    sides = (found["predicted"], found["measured"])
    peaks = [readable_bytes(side["peak_bytes"]) for side in sides]
    times = [f"{1e3 * side['seconds']:.2f} ms" for side in sides]
    ratio = found["ratio"]
    rows = [("peak memory", *peaks, f"{ratio['memory']:.3f}"), ("time", *times, f"{ratio['time']:.3f}")]
    console.print(table((found["machine"]["name"], "predicted", "measured", "ratio"), rows))
