"""Write the tables of the README and of the benchmark page from committed results: `make readme`.

Each table is between `<!-- name -->` and `<!-- /name -->`. No figure is typed by hand: measurements come from files in
docs/results, which commands write, and the models' figures from their cards.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import cost as report
from benchmarks import timed
from benchmarks.auto import choose_again, read_rows
from benchmarks.sparse import draw_sparse
from benchmarks.timed import SUMMARY_COLUMNS, summary_cells
from clearhead.course.exercises import render, solve

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "docs" / "results"
PICTURES = ROOT / "docs" / "pictures"
BUNDLED_FOLDER = ROOT / "clearhead" / "hub" / "models"

GRID_TIMES = ("same mask", "new mask", "planned", "flex", "flex, new mask")
BIAS_TIMES = ("bias", "plain", "flex")


def attention() -> str:
    """Return the results of `python -m benchmarks attention`."""
    document = json.loads((RESULTS / "attention.json").read_text(encoding="utf-8"))
    rows = [(row["name"], f"{row['ratio']:.3f}", f"≤ {row['target']:g}") for row in document["rows"]]
    machine, torch = document["machine"], document["versions"]["torch"]
    where = f"{machine['processor']}, {machine['threads']} threads, torch {torch}"
    return _table(("clearhead / baseline", "ratio of times", "target"), rows) + f"\n\nMeasured on {where}."


def models() -> str:
    """Return the bundled models, from their cards."""
    rows = []
    for path in sorted(BUNDLED_FOLDER.glob("*/card.toml")):
        card = tomllib.loads(path.read_text(encoding="utf-8"))
        rows.append((f"`{path.parent.name}`", card["description"], f"{card['parameters']:,}", card["summary"]))
    return _table(("model", "description", "parameters", "result"), rows)


def engine() -> str:
    """Return the results of `python -m benchmarks engine` on a GPU and on CPUs, marking targets that are not met."""
    paths = [RESULTS / "engine.json", *sorted(RESULTS.glob("engine-cpu*.json"))]
    return "\n\n".join(map(_engine, paths))


def _engine(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in document["rows"]:
        target = f"≥ {row['target']:g}" + ("" if row["meets_target"] else " (not yet)")
        value, baseline_value = (
            f"{row[key]:,.4g}" if row[key] < 1e4 else f"{row[key]:,.0f}" for key in ("value", "baseline_value")
        )
        baseline = f"{row['baseline']}: {baseline_value}"
        name = row["benchmark"].replace("|", "\\|")
        rows.append((name, f"{value} {row['unit']}", baseline, f"{row['speedup']:.2f}", target))
    machine = document["machine"]
    where = f"one {machine['gpu']}" if machine["gpu"] else f"{machine['processor']}, {machine['threads']} threads"
    measured = f"Measured on {where}, torch {document['versions']['torch']}."
    return _table(("benchmark", "clearhead", "baseline", "speedup", "target"), rows) + f"\n\n{measured}"


def cost() -> str:
    """Return predicted and measured costs, from `python -m benchmarks cost --out`."""
    document = report.read(RESULTS / "cost.json")
    return report.summary(document)


def sparse() -> str:
    """Return times relative to dense attention, at the first size of the sparse benchmark, and a summary."""
    document = json.loads((RESULTS / "sparse.json").read_text(encoding="utf-8"))
    length, width = document["rows"][0]["length"], document["rows"][0]["width"]
    rows = []
    for row in document["rows"]:
        if (row["length"], row["width"]) != (length, width) or row["fraction"] is None:
            continue
        mask = row["mask"] if len(row["mask"]) <= 60 else row["name"]
        cells = [
            _with_target(row["fraction"], row["target"]),
            _with_target(row["fraction_both"], row["target_both"]),
            _flex(row),
        ]
        rows.append((f"`{mask}`".replace("|", "\\|"), f"{row['density']:.4f}", *cells))
    columns = ("mask", "density", "forward", "forward + backward", "FlexAttention, both")
    first = document["rows"][0]
    where = f"{document['machine']['gpu']}, torch {document['versions']['torch']}, bfloat16"
    sizes = f"batch {first['batch']}, {first['heads']} heads, head dim {width}, {length:,} tokens"
    caption = (
        f"Measured on one {where}, {sizes}. Planning is not included.\n{_all_sizes(document['rows'])}\n{_choices()}"
    )
    return f"{_table(columns, rows)}\n\n{caption}"


def changing() -> str:
    """Return the results of `python -m benchmarks sparse --changing`."""
    path = RESULTS / "sparse-changing.json"
    if not path.exists():
        return _table(SUMMARY_COLUMNS, [("not measured yet", *[""] * (len(SUMMARY_COLUMNS) - 1))])
    rows = timed.read_any_rows(path)
    layouts = [row for row in rows if (row.section, row.name) == ("layouts", "causal & documents")]
    flex = {row.key[1:]: row.times for row in rows if row.section == "flex"}
    names = ("repeated", "changing", "flex", "varlen", "dense")
    cells = []
    for row in sorted(layouts, key=lambda row: (row.sizes["batch"], row.sizes["length"])):
        times = {"flex": flex.get(row.key[1:], {}).get("flex")} | row.times
        sizes = (row.sizes["batch"], f"{row.sizes['length']:,}")
        cells.append((*sizes, *(_milliseconds(times.get(name)) for name in names)))
    columns = ("batch", "length", "same mask", "new documents", "FlexAttention", "varlen attention", "dense causal")
    return f"{_table(columns, cells)}\n\n{_times_caption(path)}\n\n{_summary_table(rows)}"


def expressions() -> str:
    """Return the results of `python -m benchmarks expressions`."""
    path = RESULTS / "expressions.json"
    if not path.exists():
        return _table(SUMMARY_COLUMNS, [("not measured yet", *[""] * (len(SUMMARY_COLUMNS) - 1))])
    rows = timed.read_any_rows(path)
    grids = [row for row in rows if row.section == "grids"]
    cells = [
        (row.name, row.sizes["window"], *(_milliseconds(row.times.get(name)) for name in GRID_TIMES)) for row in grids
    ]
    others = [row for row in rows if row.section != "grids"]
    bias_cells = [(row.name, *(_milliseconds(row.times.get(name)) for name in BIAS_TIMES)) for row in others]
    parts = (
        _table(("mask", "window", *GRID_TIMES), cells),
        _table(("scores", "with the bias or the cap", "without", "FlexAttention"), bias_cells),
        _times_caption(path),
        _summary_table(rows),
    )
    return "\n\n".join(parts)


def decode() -> str:
    """Return the results of `python -m benchmarks decode`."""
    path = RESULTS / "decode.json"
    if not path.exists():
        return _table(SUMMARY_COLUMNS, [("not measured yet", *[""] * (len(SUMMARY_COLUMNS) - 1))])
    rows = timed.read_any_rows(path)
    torch_times = {row.key[1:]: row.times.get("torch") for row in rows if row.section == "torch"}
    steps = [row for row in rows if row.section == "steps" and "clearhead" in row.times]
    cells = []
    for row in sorted(steps, key=lambda row: (row.name, row.sizes["context"], row.sizes["batch"])):
        point = (row.name, f"{row.sizes['context']:,}", row.sizes["batch"])
        times = (_milliseconds(row.times["clearhead"]), _milliseconds(torch_times.get(row.key[1:])))
        cells.append((*point, *times, f"{row.times['limit'] / row.times['clearhead']:.2f}"))
    columns = ("model", "context", "batch", "clearhead", "plain torch", "fraction of the memory limit")
    return f"{_table(columns, cells)}\n\n{_times_caption(path)}\n\n{_summary_table(rows)}"


def _milliseconds(time: float | None) -> str:
    return "–" if time is None else f"{time:.2f} ms"


def _times_caption(path: Path) -> str:
    """Return where a results file was measured."""
    document = json.loads(path.read_text(encoding="utf-8"))
    machine = document["machine"]
    where = f"one {machine['gpu']}" if machine["gpu"] else f"{machine['processor']}, {machine['threads']} threads"
    return f"Measured on {where}, torch {document['versions']['torch']}."


def _summary_table(rows: list[timed.Timing]) -> str:
    """Return the ratios of all sections: target, number of rows that meet it, median, best and worst point."""
    return _table(SUMMARY_COLUMNS, [tuple(cell.replace("|", "\\|") for cell in row) for row in summary_cells(rows)])


def _all_sizes(rows: list[dict[str, Any]]) -> str:
    """Return the worst ratios over all sizes to dense attention and to FlexAttention."""
    lengths, widths = ({row[field] for row in rows} for field in ("length", "width"))
    with_flex = [row for row in rows if row["flex_both"] is not None]
    dense, flex = (
        max(max(row["sparse"] / row[prefix], row["sparse_both"] / row[f"{prefix}_both"]) for row in subset)
        for subset, prefix in ((rows, "dense"), (with_flex, "flex"))
    )
    measured = "" if len(with_flex) == len(rows) else f" in the {len(with_flex)} rows that measure it"
    return (
        f"In all {len(rows)} rows of the file ({min(lengths):,} to {max(lengths):,} tokens, head dim "
        f"{' and '.join(map(str, sorted(widths)))}) sparse attention takes at most {dense:.2f} of the time of dense "
        f"attention, and at most {flex:.2f} of the time of FlexAttention{measured}."
    )


def _choices() -> str:
    """Return the time lost by choosing with the cost model, from `python -m benchmarks auto`."""
    rows = [choose_again(row) for path in sorted(RESULTS.glob("auto*.json")) for row in read_rows(path)]
    lengths = [row.length for row in rows]
    kinds = sorted({(row.dtype, row.width) for row in rows})
    return (
        f'`impl="auto"` at {min(lengths):,} to {max(lengths):,} tokens '
        f"({', '.join(f'{dtype} with head dim {width}' for dtype, width in kinds)}) chooses the faster implementation "
        f"in {sum(row.slowdown == 1.0 for row in rows)} of {len(rows)} cases, and is at most "
        f"{100 * (max(row.slowdown for row in rows) - 1):.1f} % slower (`python -m benchmarks auto` measures both)."
    )


def _with_target(fraction: float, target: float | None) -> str:
    return f"{fraction:.3f}" if target is None else f"{fraction:.3f} (target {target:g})"


def _flex(row: dict[str, Any]) -> str:
    if row["flex"] is None or row["flex_both"] is None:
        return "not measured"
    return f"{row['flex'] / row['dense']:.3f}, {row['flex_both'] / row['dense_both']:.3f}"


def tracing() -> str:
    """Return the overhead of tracing, from `python -m benchmarks tracing`."""
    document = json.loads((RESULTS / "tracing.json").read_text(encoding="utf-8"))
    rows = [
        (
            f"`{row['mask']}`".replace("|", "\\|"),
            f"{row['ratio']:.3f}",
            f"{row['extra_peak_bytes'] / 2**20:.0f} MiB",
            f"{row['rows_ms']:.1f} ms",
            f"{row['full_weights_bytes'] / 2**20:,.0f} MiB",
        )
        for row in document["rows"]
    ]
    first = document["rows"][0]
    columns = (
        "mask",
        "forward time, traced / untraced",
        "memory of the trace",
        f"weights of {first['rows']} rows of a head",
        "T × T weights of a head",
    )
    where = f"{document['machine']['gpu']}, {first['length']:,} tokens, {first['layers']} layers, {first['dtype']}"
    return _table(columns, rows) + f"\n\nMeasured on one {where}."


def worksheet() -> str:
    """Return the attention weights of the de-duplicating decoder in exact numbers, from its worksheet."""
    sheet = render.markdown(solve("sort-dedup"))
    section = next(part for part in sheet.split("\n## ") if "(`weights`)" in part.partition("\n")[0])
    exact = section.partition("\n\nIn decimals:")[0]
    return exact[exact.index("|") :]


TABLES = {
    "attention": attention,
    "models": models,
    "changing": changing,
    "decode": decode,
    "expressions": expressions,
    "engine": engine,
    "cost": cost,
    "sparse": sparse,
    "tracing": tracing,
    "worksheet": worksheet,
}


PAGES = {
    README: ("models",),
    BENCHMARKS: ("attention", "changing", "sparse", "expressions", "decode", "engine", "tracing", "cost", "worksheet"),
}


def updated(page: Path) -> str:
    """Return a page with all of its tables regenerated."""
    text = page.read_text(encoding="utf-8")
    for name in PAGES[page]:
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        table = TABLES[name]()
        text, n_replaced = pattern.subn(lambda match, table=table: match[1] + table + "\n" + match[2], text)  # type: ignore[misc]
        if n_replaced != 1:
            raise SystemExit(f"{page.name} has {n_replaced} marks for the table {name!r}; expected one")
    return text


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Update the pictures and the pages."""
    draw_sparse(RESULTS / "sparse.json", PICTURES / "sparse.svg")
    for page in PAGES:
        page.write_text(updated(page), encoding="utf-8")
        sys.stdout.write(f"{page.relative_to(ROOT)} is up to date\n")


if __name__ == "__main__":
    main()
