"""`clearhead bench`: compare with a baseline in one process and print the ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option, parse_dtype, resolve_device
from clearhead.cli.output import emit, print_line, progress, table

Device = Annotated[str | None, option("cpu or cuda. Default: a GPU if available.")]

bench = typer.Typer(help="Compare with a baseline in one process and print the ratio.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _lines(json: bool, line: Callable[[Any], str] = str) -> Callable[[Any], None]:
    """What prints a row for people as soon as it is measured."""
    return lambda row: None if json else print(line(row), flush=True)


def _results(rows: Sequence[Any], json: bool, *shown: RenderableType) -> None:
    """One document for programs; for people a table, or, where they saw the rows as they came, a line."""
    from clearhead.bench.results import machine, versions

    documents = [row if isinstance(row, dict) else row.to_dict() for row in rows]
    emit(json, {"machine": machine(), "versions": versions(), "rows": documents}, *shown)


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


@bench.command()
def core(
    repeats: Annotated[
        int, option("Number of rounds; each measures both implementations once, alternately.", min=1)
    ] = 60,
    json: Json = False,
) -> None:
    """Compare fused attention with torch, and multi-head attention with torch.nn."""
    from clearhead.bench.core import measure

    with progress("measuring", hidden=json) as told:
        rows = measure(repeats, on_round=told)
    cells = [
        (r.name, f"{r.ours_ms:.2f}", f"{r.peer_ms:.2f}", f"{r.ratio:.3f}", f"≤ {r.bound:g}", _yes(r.holds))
        for r in rows
    ]
    _results(rows, json, table(("what", "ours, ms", "peer, ms", "ratio", "wanted", "holds"), cells))


@bench.command()
def sparse(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("sparse.json"),
    quick: Annotated[bool, option("Smoke test: 16,384 tokens and head dim 64 only.", "--smoke")] = False,
    flex: Annotated[bool, option("Also measure FlexAttention (requires compilation).")] = True,
    lengths: Annotated[list[int] | None, option("Measure this length only. Repeatable.", "--length", min=1)] = None,
    widths: Annotated[list[int] | None, option("Measure this head dim only. Repeatable.", "--width", min=1)] = None,
    time_limit: Annotated[float, option("Start no further row after this time, in seconds.")] = 240.0,
    earlier: Annotated[Path | None, option("Resume from this results file of the same machine.", "--resume")] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """A catalogue of masks: the gathered way and FlexAttention as fractions of dense attention's time."""
    from clearhead.bench.sparse import line, measure, options_for, read_rows

    device = resolve_device(device)
    options = options_for(device, quick=quick, flex=flex and device != "cpu", seconds=time_limit)
    options = replace(options, lengths=tuple(lengths or options.lengths), widths=tuple(widths or options.widths))
    kept = read_rows(earlier) if earlier is not None else ()
    rows = measure(options, out, on_row=_lines(json, line), kept=kept)
    _results(rows, json, f"results written to {out}")


@bench.command()
def auto(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("auto.json"),
    time_limit: Annotated[float, option("Start no further mask after this time, in seconds.")] = 240.0,
    width: Annotated[int, option("Width of a head.", min=1)] = 64,
    dtype: Annotated[str | None, option("float32, bfloat16 or float16; by default float32 on a CPU.")] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """What impl="auto" chooses for each mask of the catalogue, and what the choice loses against the faster way."""
    from clearhead.bench.auto import line, measure, options_for, summary

    kind = None if dtype is None else parse_dtype(dtype, "float32", "bfloat16", "float16")
    options = options_for(resolve_device(device), time_limit, width=width, dtype=kind)
    rows = measure(options, out, on_row=_lines(json, line))
    _results(rows, json, f"{summary(rows)}; results written to {out}")


@bench.command()
def look(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("look.json"),
    device: Device = None,
    json: Json = False,
) -> None:
    """Compare a forward pass with and without a trace of one attention layer, and time its attention weights."""
    from clearhead.bench.look import line, measure, options_for

    options = options_for(resolve_device(device))
    rows = measure(options, out, on_row=_lines(json, line))
    _results(rows, json, f"results written to {out}")


@bench.command()
def generation(
    prompt: Annotated[int, option("Prompt length.", min=1)] = 512,
    max_new_tokens: Annotated[int, option("Number of new tokens.", min=1)] = 128,
    json: Json = False,
) -> None:
    """Greedy decoding with the cache against computing everything anew at every step."""
    from clearhead.bench.generation import cache_speed

    found = cache_speed(prompt=prompt, max_new_tokens=max_new_tokens)
    times = {"cached_s": found.cached, "recomputed_s": found.recomputed, "ratio": found.ratio}
    row = {"name": f"greedy, {max_new_tokens} tokens after {prompt}", **times, "same_ids": found.same}
    cells = [(f"{found.cached:.2f}", f"{found.recomputed:.2f}", f"{found.ratio:.1f}", _yes(found.same))]
    _results([row], json, table(("with the cache, s", "without, s", "times faster", "same ids"), cells))


@bench.command()
def engine(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("engine.json"),
    data: Annotated[Path | None, option("The folder of the pairs that the translator is timed on.")] = None,
    filter_: Annotated[str | None, option("Run only benchmarks whose name contains this.", "--filter")] = None,
    smoke: Annotated[bool, option("Smoke test with tiny sizes; timings are not meaningful.", "--smoke")] = False,
    device: Device = None,
    json: Json = False,
) -> None:
    """Compare decoding and training with baselines and with the limits of the machine."""
    from clearhead.bench.engine import Setting, line, measure

    setting = Setting(resolve_device(device), data, smoke)
    rows = measure(setting, out, only=filter_, on_row=_lines(json, line))
    _results(rows, json, f"results written to {out}")


@bench.command()
def study(
    name: Annotated[str | None, argument("Name of the study. Default: list all studies.", show_default=False)] = None,
    seeds: Annotated[int, option("Number of seeds per configuration: 0, 1, ….", min=1)] = 3,
    out: Annotated[
        Path | None,
        option(
            "Results file. Default: study-NAME.json. It is written after every row; an existing file is completed.",
            show_default=False,
        ),
    ] = None,
    smoke: Annotated[bool, option("Smoke test with tiny sizes; results are not meaningful.", "--smoke")] = False,
    data: Annotated[Path | None, option("Data of the study, if it needs any.")] = None,
    jobs: Annotated[int, option("Number of processes.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Small trainings that answer what the documents only speak of: minutes on one core, then what was found."""
    from clearhead.bench import studies

    if name is None:
        known = studies.STUDIES.values()
        document = [{"name": s.name, "asks": s.asks, "says": list(s.says)} for s in known]
        return emit(json, document, table(("study", "asks"), [(s.name, s.asks) for s in known]))
    out = Path(f"study-{name}{'-smoke' if smoke else ''}.json") if out is None else out
    how: dict[str, Any] = {"seeds": seeds, "quick": smoke, "data": data, "jobs": jobs}
    try:
        record = studies.carry_out(studies.study(name), out, **how, on_row=_lines(json))
    except KeyboardInterrupt:
        print_line(f"interrupted; the same command resumes from {out}")
        raise
    last = f"{len(record.rows)} rows in {out}; draw them with: clearhead plot study {out}"
    emit(json, record.to_dict(), table(*record.table()), record.finding, last)


@bench.command()
def explore(
    out: Annotated[Path, option("Results file, written after every panel.")] = Path("explore.json"),
    json: Json = False,
) -> None:
    """Measure the response time of the explorer to keystrokes, in a browser."""
    from clearhead.bench.explore import measure

    rows = measure(out)
    cells = [
        (r.panel, r.keys, f"{r.median_ms:.0f}", f"{r.most_of_them_ms:.0f}", f"{r.worst_ms:.0f}", _yes(r.holds))
        for r in rows
    ]
    heads = ("typed into", "keys", "median, ms", "19 of 20, ms", "worst, ms", f"≤ {rows[0].bound_ms:g} ms")
    _results(rows, json, table(heads, cells))
