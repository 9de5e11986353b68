"""The results file of `clearhead cost --measure --out FILE`, and the README's table, which is made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clearhead.disk import write_atomically
from clearhead.errors import StorageError

__all__ = ["line", "markdown", "read", "summary", "worst", "write"]


def write(document: dict[str, Any], path: str | Path) -> None:
    """The results document as a file, whole or not at all."""
    write_atomically(Path(path), (json.dumps(document, indent=1) + "\n").encode())


def read(path: str | Path) -> dict[str, Any]:
    """The results document; refuses a file that is none."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise StorageError(
            f"{path} cannot be read as results: {error}; write it with clearhead cost --measure --out FILE"
        ) from error
    if not isinstance(document, dict) or document.get("format") != 1 or "rows" not in document:
        raise StorageError(
            f"{path} holds no cost results of format 1; write it with clearhead cost --measure --out FILE"
        )
    return document


def line(row: dict[str, Any]) -> str:
    """A case for the terminal: predicted, measured, ratio, of memory and of time."""
    how = "train" if row["training"] else "infer"
    size = f"{row['model']:<11}{row['tokens']:>6}{row['batch']:>5}  {row['dtype']:<9}{how:<7}"
    sides = (row["predicted"], row["measured"])
    memory = "".join(f"{side['peak_bytes'] / 2**20:9.0f}" for side in sides)
    seconds = "".join(f"{1e3 * side['seconds']:9.2f}" for side in sides)
    ratio = row["ratio"]
    return f"{size}{memory} MiB {ratio['memory']:6.3f}   {seconds} ms {ratio['time']:6.3f}   {row['limit']}"


def markdown(document: dict[str, Any]) -> str:
    """One line a case: predicted beside measured, and their ratio."""
    lines = [
        "| model | tokens | batch | dtype | | peak, predicted | measured | ratio | time, predicted | measured | ratio |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        ratio = row["ratio"]
        peaks = " | ".join(f"{row[side]['peak_bytes'] / 2**30:.2f} GiB" for side in ("predicted", "measured"))
        times = " | ".join(f"{1e3 * row[side]['seconds']:.1f} ms" for side in ("predicted", "measured"))
        lines.append(
            f"| {row['model']} | {row['tokens']:,} | {row['batch']} | {row['dtype']} | "
            f"{'training' if row['training'] else 'inference'} | "
            f"{peaks} | {ratio['memory']:.3f} | {times} | {ratio['time']:.2f} |"
        )
    machine, versions = document["machine"], document["versions"]
    rates = ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in machine["matrix_rate"].items())
    lines += [
        "",
        f"{machine['name']}: {rates}, {machine['bandwidth'] / 1e12:.2f} TB/s; torch {versions['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def summary(document: dict[str, Any]) -> str:
    """One line for each model, dtype and mode: over which sizes, and the ratios from the lowest to the highest."""
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        groups.setdefault((row["model"], row["dtype"], row["training"]), []).append(row)
    lines = [
        "| model | | tokens | peak memory, predicted / measured | time, predicted / measured |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (model, dtype, training), rows in groups.items():
        tokens = ", ".join(f"{row['tokens']:,}" for row in rows)
        cells = [_range([row["ratio"][what] for row in rows]) for what in ("memory", "time")]
        how = f"{dtype}, {'training' if training else 'inference'}"
        lines.append(f"| `{model}` | {how} | {tokens} | {cells[0]} | {cells[1]} |")
    machine, versions = document["machine"], document["versions"]
    near = sum(abs(row["ratio"]["time"] - 1) <= 0.2 for row in document["rows"])
    lines += [
        "",
        f"Measured on one {machine['name']}, torch {versions['torch']}: memory within "
        f"{100 * worst(document)['memory']:.1f} % everywhere, time within 20 % in {near} of {len(document['rows'])} cases.",
    ]
    return "\n".join(lines)


def _range(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def worst(document: dict[str, Any]) -> dict[str, float]:
    """The largest distance of a ratio from 1, for memory and for time."""
    return {what: max(abs(row["ratio"][what] - 1.0) for row in document["rows"]) for what in ("memory", "time")}
