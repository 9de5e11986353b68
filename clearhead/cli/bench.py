"""`clearhead bench`: measure side by side with a peer, in one run, and print the ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import Json, console, device_here, show_json, table

if TYPE_CHECKING:
    from clearhead.bench.results import Row

Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU where there is one.")]

bench = typer.Typer(
    help="Measure side by side with a peer; what is printed is a ratio of one run.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


def _shown(rows: Sequence[Row], said: str, json: bool) -> None:
    """One document for programs; for people, who saw the rows as they came, one line."""
    if json:
        from clearhead.bench.results import machine, versions

        show_json({"machine": machine(), "versions": versions(), "rows": [row.to_dict() for row in rows]})
    else:
        console.print(said, markup=False, soft_wrap=True)


@bench.command()
def core(
    repeats: Annotated[int, typer.Option(help="Rounds; each measures both sides once, in turn.", min=1)] = 60,
    json: Json = False,
) -> None:
    """Fused attention against calling torch directly, and multi-head attention against torch.nn's."""
    from rich.progress import Progress

    from clearhead.bench.core import measure

    with Progress(console=console, transient=True, disable=json) as progress:
        task = progress.add_task("measuring", total=None)
        rows = measure(repeats, on_round=lambda done, total: progress.update(task, completed=done, total=total))
    if json:
        _shown(rows, "", json)
        return
    cells = [
        (
            r.name,
            f"{r.ours_ms:.2f}",
            f"{r.peer_ms:.2f}",
            f"{r.ratio:.3f}",
            f"≤ {r.bound:g}",
            "yes" if r.holds else "NO",
        )
        for r in rows
    ]
    console.print(table(("what", "ours, ms", "peer, ms", "ratio", "wanted", "holds"), cells))


@bench.command()
def sparse(
    out: Annotated[Path, typer.Option(help="The results file; written after every row.")] = Path("sparse.json"),
    quick: Annotated[bool, typer.Option("--quick", help="16,384 tokens of width 64 only.")] = False,
    flex: Annotated[bool, typer.Option(help="Measure FlexAttention too (it has to be compiled).")] = True,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", help="Of this length only; may be repeated.", min=1)
    ] = None,
    widths: Annotated[
        list[int] | None, typer.Option("--width", help="Heads of this width only; may be repeated.", min=1)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Begin no further row after this long.")] = 240.0,
    earlier: Annotated[
        Path | None, typer.Option("--continue", help="A results file of this machine: measure what it lacks.")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """A catalogue of masks: the gathered way and FlexAttention as fractions of dense attention's time."""
    from clearhead.bench.sparse import measure, options_for
    from clearhead.bench.sparse_rows import line, read_rows

    device = device_here(device)
    options = options_for(device, quick=quick, flex=flex and device != "cpu", seconds=seconds)
    options = replace(options, lengths=tuple(lengths or options.lengths), widths=tuple(widths or options.widths))
    kept = read_rows(earlier) if earlier is not None else ()
    rows = measure(options, out, on_row=lambda row: None if json else print(line(row), flush=True), kept=kept)
    _shown(rows, f"results written to {out}", json)


@bench.command()
def auto(
    out: Annotated[Path, typer.Option(help="The results file; written after every length.")] = Path("auto.json"),
    seconds: Annotated[float, typer.Option(help="Begin no further mask after this long.")] = 240.0,
    width: Annotated[int, typer.Option(help="Width of a head.", min=1)] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default float32 on a CPU.")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """What impl="auto" chooses for each mask of the catalogue, and what the choice loses against the faster way."""
    import torch

    from clearhead.bench.auto import line, measure, options_for, summary
    from clearhead.errors import DtypeError

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise DtypeError(f"dtype is {dtype!r}; expected float32, bfloat16 or float16")
    options = options_for(
        device_here(device),
        seconds,
        width=width,
        dtype=None if dtype is None else getattr(torch, dtype),
    )
    rows = measure(options, out, on_row=lambda row: None if json else print(line(row), flush=True))
    _shown(rows, f"{summary(rows)}; results written to {out}", json)


@bench.command()
def look(
    out: Annotated[Path, typer.Option(help="The results file; written after every row.")] = Path("look.json"),
    device: Device = None,
    json: Json = False,
) -> None:
    """A forward pass with a trace of one attention layer against one without, and what its weights cost afterwards."""
    from clearhead.bench.look import line, measure, options_for

    options = options_for(device_here(device))
    rows = measure(options, out, on_row=lambda row: None if json else print(line(row), flush=True))
    _shown(rows, f"results written to {out}", json)


@bench.command()
def generation(
    prompt: Annotated[int, typer.Option(help="Length of the prompt.", min=1)] = 512,
    max_new: Annotated[int, typer.Option(help="How many new tokens.", min=1)] = 128,
    json: Json = False,
) -> None:
    """Greedy decoding with the cache against computing everything anew at every step."""
    from clearhead.bench.results import machine, versions
    from clearhead.generation.speed import cache_speed

    found = cache_speed(prompt=prompt, max_new=max_new)
    if json:
        row = {
            "name": f"greedy, {max_new} tokens after {prompt}",
            "cached_s": found.cached,
            "recomputed_s": found.recomputed,
            "ratio": found.ratio,
            "same_ids": found.same,
        }
        show_json({"machine": machine(), "versions": versions(), "rows": [row]})
        return
    cells = [
        (
            f"{found.cached:.2f}",
            f"{found.recomputed:.2f}",
            f"{found.ratio:.1f}",
            "yes" if found.same else "NO",
        )
    ]
    console.print(table(("with the cache, s", "without, s", "times faster", "same ids"), cells))


@bench.command()
def engine(
    out: Annotated[Path, typer.Option(help="The results file; written after every row.")] = Path("engine.json"),
    data: Annotated[Path | None, typer.Option(help="The folder of the pairs that the translator is timed on.")] = None,
    only: Annotated[str | None, typer.Option(help="Only the rows whose maker has this in its name.")] = None,
    trial: Annotated[bool, typer.Option("--trial", help="Tiny sizes: whether it runs, not how fast.")] = False,
    device: Device = None,
    json: Json = False,
) -> None:
    """Decoding and training beside their peers, and against what the machine can do."""
    from clearhead.bench.engine import Setting, line, measure

    setting = Setting(device_here(device), data, trial)
    rows = measure(setting, out, only=only, on_row=lambda row: None if json else print(line(row), flush=True))
    _shown(rows, f"results written to {out}", json)


@bench.command()
def study(
    name: Annotated[
        str | None, typer.Argument(help="Which study; without a name, all of them are listed.", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds each choice is tried with: 0, 1, ….", min=1)] = 3,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The results file, study-NAME.json by default. It is whole after every row; if it is there "
            "already, what it lacks is added.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: whether it runs, not what comes of it.")] = False,
    data: Annotated[Path | None, typer.Option(help="Where the data lie, for a study that reads any.")] = None,
    jobs: Annotated[int, typer.Option(help="So many processes share the work.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Small trainings that answer what the documents only speak of: minutes on one core, then what was found."""
    from clearhead.bench import studies

    if name is None:
        if json:
            show_json([{"name": s.name, "asks": s.asks, "says": list(s.says)} for s in studies.STUDIES.values()])
        else:
            console.print(table(("study", "asks"), [(s.name, s.asks) for s in studies.STUDIES.values()]))
        return
    out = Path(f"study-{name}{'-quick' if quick else ''}.json") if out is None else out
    try:
        record = studies.carry_out(
            studies.study(name),
            out,
            seeds=seeds,
            quick=quick,
            data=data,
            jobs=jobs,
            on_row=lambda row: None if json else print(row, flush=True),
        )
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on with {out}", markup=False, soft_wrap=True)
        raise
    if json:
        show_json(record.to_dict())
        return
    console.print(table(*record.table()))
    for said in (record.finding, f"{len(record.rows)} rows in {out}; draw them with: clearhead plot study {out}"):
        console.print(said, markup=False, soft_wrap=True)


@bench.command()
def explore(
    out: Annotated[Path, typer.Option(help="The results file; written after every panel.")] = Path("explore.json"),
    json: Json = False,
) -> None:
    """Keystrokes in the live page, measured in a browser."""
    from clearhead.bench.explore import measure

    rows = measure(out)
    if json:
        _shown(rows, "", json)
        return
    cells = [
        (
            r.panel,
            r.keys,
            f"{r.median_ms:.0f}",
            f"{r.most_of_them_ms:.0f}",
            f"{r.worst_ms:.0f}",
            "yes" if r.holds else "NO",
        )
        for r in rows
    ]
    heads = ("typed into", "keys", "median, ms", "19 of 20, ms", "worst, ms", f"≤ {rows[0].bound_ms:g} ms")
    console.print(table(heads, cells))
