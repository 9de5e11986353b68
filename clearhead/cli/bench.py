"""`clearhead bench`: measure side by side with a peer, in one run, and print the ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, device_here, dtype_of, option
from clearhead.cli.output import answer, progress, table, tell

Device = Annotated[str | None, option("cpu or cuda; by default a GPU where there is one.")]

bench = typer.Typer(
    help="Measure side by side with a peer; what is printed is a ratio of one run.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


def _lines(json: bool, line: Callable[[Any], str] = str) -> Callable[[Any], None]:
    """What prints a row for people as soon as it is measured."""
    return lambda row: None if json else print(line(row), flush=True)


def _results(rows: Sequence[Any], json: bool, *shown: RenderableType) -> None:
    """One document for programs; for people a table, or, where they saw the rows as they came, a line."""
    from clearhead.bench.results import machine, versions

    documents = [row if isinstance(row, dict) else row.to_dict() for row in rows]
    answer(json, {"machine": machine(), "versions": versions(), "rows": documents}, *shown)


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


@bench.command()
def core(
    repeats: Annotated[int, option("Rounds; each measures both sides once, in turn.", min=1)] = 60, json: Json = False
) -> None:
    """Fused attention against calling torch directly, and multi-head attention against torch.nn's."""
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
    out: Annotated[Path, option("The results file; written after every row.")] = Path("sparse.json"),
    quick: Annotated[bool, option("16,384 tokens of width 64 only.", "--quick")] = False,
    flex: Annotated[bool, option("Measure FlexAttention too (it has to be compiled).")] = True,
    lengths: Annotated[list[int] | None, option("Of this length only; may be repeated.", "--length", min=1)] = None,
    widths: Annotated[list[int] | None, option("Heads of this width only; may be repeated.", "--width", min=1)] = None,
    seconds: Annotated[float, option("Begin no further row after this long.")] = 240.0,
    earlier: Annotated[
        Path | None, option("A results file of this machine: measure what it lacks.", "--continue")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """A catalogue of masks: the gathered way and FlexAttention as fractions of dense attention's time."""
    from clearhead.bench.sparse import line, measure, options_for, read_rows

    device = device_here(device)
    options = options_for(device, quick=quick, flex=flex and device != "cpu", seconds=seconds)
    options = replace(options, lengths=tuple(lengths or options.lengths), widths=tuple(widths or options.widths))
    kept = read_rows(earlier) if earlier is not None else ()
    rows = measure(options, out, on_row=_lines(json, line), kept=kept)
    _results(rows, json, f"results written to {out}")


@bench.command()
def auto(
    out: Annotated[Path, option("The results file; written after every row.")] = Path("auto.json"),
    seconds: Annotated[float, option("Begin no further mask after this long.")] = 240.0,
    width: Annotated[int, option("Width of a head.", min=1)] = 64,
    dtype: Annotated[str | None, option("float32, bfloat16 or float16; by default float32 on a CPU.")] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """What impl="auto" chooses for each mask of the catalogue, and what the choice loses against the faster way."""
    from clearhead.bench.auto import line, measure, options_for, summary

    kind = None if dtype is None else dtype_of(dtype, "float32", "bfloat16", "float16")
    options = options_for(device_here(device), seconds, width=width, dtype=kind)
    rows = measure(options, out, on_row=_lines(json, line))
    _results(rows, json, f"{summary(rows)}; results written to {out}")


@bench.command()
def look(
    out: Annotated[Path, option("The results file; written after every row.")] = Path("look.json"),
    device: Device = None,
    json: Json = False,
) -> None:
    """A forward pass with a trace of one attention layer against one without, and what its weights cost afterwards."""
    from clearhead.bench.look import line, measure, options_for

    options = options_for(device_here(device))
    rows = measure(options, out, on_row=_lines(json, line))
    _results(rows, json, f"results written to {out}")


@bench.command()
def generation(
    prompt: Annotated[int, option("Length of the prompt.", min=1)] = 512,
    max_new_tokens: Annotated[int, option("How many new tokens.", min=1)] = 128,
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
    out: Annotated[Path, option("The results file; written after every row.")] = Path("engine.json"),
    data: Annotated[Path | None, option("The folder of the pairs that the translator is timed on.")] = None,
    only: Annotated[str | None, option("Only the rows whose maker has this in its name.")] = None,
    trial: Annotated[bool, option("Tiny sizes: whether it runs, not how fast.", "--trial")] = False,
    device: Device = None,
    json: Json = False,
) -> None:
    """Decoding and training beside their peers, and against what the machine can do."""
    from clearhead.bench.engine import Setting, line, measure

    setting = Setting(device_here(device), data, trial)
    rows = measure(setting, out, only=only, on_row=_lines(json, line))
    _results(rows, json, f"results written to {out}")


@bench.command()
def study(
    name: Annotated[
        str | None, argument("Which study; without a name, all of them are listed.", show_default=False)
    ] = None,
    seeds: Annotated[int, option("How many seeds each choice is tried with: 0, 1, ….", min=1)] = 3,
    out: Annotated[
        Path | None,
        option(
            "The results file, study-NAME.json by default. It is whole after every row; if it is there "
            "already, what it lacks is added.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, option("Tiny sizes: whether it runs, not what comes of it.", "--quick")] = False,
    data: Annotated[Path | None, option("Where the data lie, for a study that reads any.")] = None,
    jobs: Annotated[int, option("So many processes share the work.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Small trainings that answer what the documents only speak of: minutes on one core, then what was found."""
    from clearhead.bench import studies

    if name is None:
        known = studies.STUDIES.values()
        document = [{"name": s.name, "asks": s.asks, "says": list(s.says)} for s in known]
        return answer(json, document, table(("study", "asks"), [(s.name, s.asks) for s in known]))
    out = Path(f"study-{name}{'-quick' if quick else ''}.json") if out is None else out
    how: dict[str, Any] = {"seeds": seeds, "quick": quick, "data": data, "jobs": jobs}
    try:
        record = studies.carry_out(studies.study(name), out, **how, on_row=_lines(json))
    except KeyboardInterrupt:
        tell(f"stopped; the same command goes on with {out}")
        raise
    last = f"{len(record.rows)} rows in {out}; draw them with: clearhead plot study {out}"
    answer(json, record.to_dict(), table(*record.table()), record.finding, last)


@bench.command()
def explore(
    out: Annotated[Path, option("The results file; written after every panel.")] = Path("explore.json"),
    json: Json = False,
) -> None:
    """Keystrokes in the live page, measured in a browser."""
    from clearhead.bench.explore import measure

    rows = measure(out)
    cells = [
        (r.panel, r.keys, f"{r.median_ms:.0f}", f"{r.most_of_them_ms:.0f}", f"{r.worst_ms:.0f}", _yes(r.holds))
        for r in rows
    ]
    heads = ("typed into", "keys", "median, ms", "19 of 20, ms", "worst, ms", f"≤ {rows[0].bound_ms:g} ms")
    _results(rows, json, table(heads, cells))
