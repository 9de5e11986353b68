"""`python -m benchmarks`: comparisons with baselines, studies, and plots of their results."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import print_results, print_rows, run_sections
from clearhead.cli.app import run_app
from clearhead.cli.options import Json, argument, option, parse_dtype, resolve_device
from clearhead.cli.output import FIGURES, console, emit, print_line, progress, show_picture, table, writing

Out = Annotated[Path, option("Output file: .png or .svg.", "--out", "-o")]
Device = Annotated[str | None, option("cpu or cuda. Default: a GPU if available.")]

Sections = Annotated[list[str] | None, option("Run this section only. Repeatable.", "--section")]
Batches = Annotated[list[int] | None, option("Measure this batch size only. Repeatable.", "--batch", min=1)]
Filter = Annotated[str, option("Measure only rows whose name contains this.", "--filter")]
Resume = Annotated[Path | None, option("Resume from this results file of the same machine.", "--resume")]

app = typer.Typer(
    name="benchmarks",
    help="Compare clearhead with baselines; both sides run in one process, and ratios are reported.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
plot = typer.Typer(help="Draw measured results to a PNG or SVG file.", no_args_is_help=True)
app.add_typer(plot, name="plot")


def _yes(condition: bool) -> str:
    """Format a boolean for a table."""
    return "yes" if condition else "NO"


@app.command()
def attention(
    repeats: Annotated[
        int, option("Number of rounds; each measures both implementations once, alternately.", min=1)
    ] = 60,
    json: Json = False,
) -> None:
    """Compare `attend` with scaled_dot_product_attention, and MultiHeadAttention with torch.nn."""
    from benchmarks.attention import measure

    with progress("measuring", hidden=json) as on_round:
        rows = measure(repeats, on_round=on_round)
    cells = [
        (r.name, f"{r.value_ms:.2f}", f"{r.baseline_ms:.2f}", f"{r.ratio:.3f}", f"≤ {r.target:g}", _yes(r.meets_target))
        for r in rows
    ]
    print_results(rows, json, table(("benchmark", "value, ms", "baseline, ms", "ratio", "target", "met"), cells))


@app.command()
def sparse(
    out: Annotated[
        Path | None,
        option(
            "Results file, written after every row. Default: sparse.json, or sparse-changing.json.", show_default=False
        ),
    ] = None,
    changing: Annotated[
        bool, option("Masks and lengths that change at every step, in wall-clock time.", "--changing")
    ] = False,
    sections: Sections = None,
    smoke: Annotated[bool, option("Smoke test with few or tiny sizes.", "--smoke")] = False,
    flex: Annotated[bool, option("Also measure FlexAttention and other peers (requires compilation).")] = True,
    lengths: Annotated[list[int] | None, option("Measure this length only. Repeatable.", "--length", min=1)] = None,
    widths: Annotated[list[int] | None, option("Measure this head dim only. Repeatable.", "--width", min=1)] = None,
    batches: Batches = None,
    filter_: Filter = "",
    time_limit: Annotated[float, option("Start no further row after this time, in seconds.")] = 240.0,
    earlier: Resume = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Measure sparse attention and FlexAttention for a catalogue of masks, or masks that change at every step."""
    device = resolve_device(device)
    if changing:
        return _changing(
            out or Path("sparse-changing.json"), device, sections, smoke, flex, lengths, batches, filter_, time_limit,
            earlier, json,
        )  # fmt: skip
    from benchmarks.sparse import line, measure, options_for, read_rows

    out = out or Path("sparse.json")
    options = options_for(device, smoke=smoke, flex=flex and device != "cpu", seconds=time_limit)
    options = replace(options, lengths=tuple(lengths or options.lengths), widths=tuple(widths or options.widths))
    earlier_rows = read_rows(earlier) if earlier is not None else ()
    rows = measure(options, out, on_row=print_rows(json, line), earlier=earlier_rows)
    print_results(rows, json, f"results written to {out}")


def _changing(
    out: Path,
    device: str,
    sections: list[str] | None,
    smoke: bool,
    peers: bool,
    lengths: list[int] | None,
    batches: list[int] | None,
    name_filter: str,
    time_limit: float,
    earlier: Path | None,
    json: bool,
) -> None:
    """Run `sparse --changing`."""
    from benchmarks.changing import measure, options_for

    sizes: dict[str, Any] = {"lengths": tuple(lengths or ()), "batches": tuple(batches or ())}
    options = replace(options_for(device, smoke=smoke), peers=peers, name_filter=name_filter, **sizes)
    run_sections(measure, options, out, sections=sections, time_limit=time_limit, earlier=earlier, json=json)


@app.command()
def expressions(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("expressions.json"),
    sections: Sections = None,
    smoke: Annotated[bool, option("Smoke test with tiny sizes; timings are not meaningful.", "--smoke")] = False,
    flex: Annotated[bool, option("Also measure FlexAttention (requires compilation).")] = True,
    lengths: Annotated[list[int] | None, option("Measure this length only. Repeatable.", "--length", min=1)] = None,
    filter_: Filter = "",
    time_limit: Annotated[float, option("Start no further row after this time, in seconds.")] = 420.0,
    earlier: Resume = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Measure masks on grids and biases of scores, compared with FlexAttention."""
    from benchmarks.expressions import measure, options_for

    sizes: dict[str, Any] = {"lengths": tuple(lengths or ())}
    options = replace(options_for(resolve_device(device), smoke=smoke), peers=flex, name_filter=filter_, **sizes)
    run_sections(measure, options, out, sections=sections, time_limit=time_limit, earlier=earlier, json=json)


@app.command()
def auto(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("auto.json"),
    time_limit: Annotated[float, option("Start no further mask after this time, in seconds.")] = 240.0,
    width: Annotated[int, option("Head dim.", min=1)] = 64,
    dtype: Annotated[
        str | None, option("float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on a GPU.")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Compare the choice of impl="auto" with the faster implementation, for a catalogue of masks."""
    from benchmarks.auto import line, measure, options_for, summary

    dtype_ = None if dtype is None else parse_dtype(dtype, "float32", "bfloat16", "float16")
    options = options_for(resolve_device(device), time_limit, width=width, dtype=dtype_)
    rows = measure(options, out, on_row=print_rows(json, line))
    print_results(rows, json, f"{summary(rows)}; results written to {out}")


@app.command()
def tracing(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("tracing.json"),
    device: Device = None,
    json: Json = False,
) -> None:
    """Compare a forward pass with and without a trace of one attention layer, and time its attention weights."""
    from benchmarks.tracing import line, measure, options_for

    options = options_for(resolve_device(device))
    rows = measure(options, out, on_row=print_rows(json, line))
    print_results(rows, json, f"results written to {out}")


@app.command()
def generation(
    prompt: Annotated[int, option("Prompt length.", min=1)] = 512,
    max_new_tokens: Annotated[int, option("Number of new tokens.", min=1)] = 128,
    json: Json = False,
) -> None:
    """Compare greedy decoding with and without a KV cache."""
    from benchmarks.generation import cache_speed

    result = cache_speed(prompt=prompt, max_new_tokens=max_new_tokens)
    times = {"cached_s": result.cached, "recomputed_s": result.recomputed, "speedup": result.speedup}
    row = {"name": f"greedy, {max_new_tokens} tokens after {prompt}", **times, "same_ids": result.same_ids}
    cells = [(f"{result.cached:.2f}", f"{result.recomputed:.2f}", f"{result.speedup:.1f}", _yes(result.same_ids))]
    print_results([row], json, table(("with cache, s", "without, s", "speedup", "same ids"), cells))


@app.command()
def engine(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("engine.json"),
    data: Annotated[
        Path | None, option("Folder with the sentence pairs of en-es, for the translation benchmarks.")
    ] = None,
    filter_: Annotated[str | None, option("Run only benchmarks whose name contains this.", "--filter")] = None,
    smoke: Annotated[bool, option("Smoke test with tiny sizes; timings are not meaningful.", "--smoke")] = False,
    device: Device = None,
    json: Json = False,
) -> None:
    """Compare decoding and training with baselines and with the limits of the machine."""
    from benchmarks.engine import Setting, line, measure

    setting = Setting(resolve_device(device), data, smoke)
    rows = measure(setting, out, name_filter=filter_, on_row=print_rows(json, line))
    print_results(rows, json, f"results written to {out}")


@app.command()
def decode(
    out: Annotated[Path, option("Results file, written after every row.")] = Path("decode.json"),
    sections: Sections = None,
    models: Annotated[
        list[str] | None, option("Measure only models with this in their name. Repeatable.", "--model")
    ] = None,
    contexts: Annotated[list[int] | None, option("Measure this context only. Repeatable.", "--context", min=1)] = None,
    batches: Batches = None,
    filter_: Filter = "",
    prompts: Annotated[int, option("Number of prompts of mixed lengths.", min=2)] = 2_000,
    max_prefill: Annotated[int, option("Skip steps after more prompt tokens.", min=1)] = 300_000,
    peers: Annotated[bool, option("Also measure plain torch and transformers (requires compilation).")] = True,
    smoke: Annotated[bool, option("Smoke test with tiny sizes; timings are not meaningful.", "--smoke")] = False,
    time_limit: Annotated[float, option("Start no further row after this time, in seconds.")] = 240.0,
    earlier: Resume = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Measure decode steps over models, batch sizes and contexts; prefill, sampling, beam search, mixed prompts."""
    from benchmarks.decoding import measure, options_for

    sizes: dict[str, Any] = {"models": tuple(models or ()), "contexts": tuple(contexts or ())}
    sizes |= {"batches": tuple(batches or ()), "n_prompts": prompts, "max_prefill": max_prefill}
    options = options_for(resolve_device(device), smoke=smoke)
    options = replace(options, **sizes, peers=peers, name_filter=filter_)
    run_sections(measure, options, out, sections=sections, time_limit=time_limit, earlier=earlier, json=json)


@app.command()
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
    """Run a small experiment on an open question of the course documents; it takes minutes on one core."""
    from benchmarks import studies

    if name is None:
        entries = studies.STUDIES.values()
        document = [{"name": s.name, "question": s.question, "statements": list(s.statements)} for s in entries]
        return emit(json, document, table(("study", "question"), [(s.name, s.question) for s in entries]))
    out = Path(f"study-{name}{'-smoke' if smoke else ''}.json") if out is None else out
    options: dict[str, Any] = {"seeds": seeds, "smoke": smoke, "data": data, "jobs": jobs}
    try:
        record = studies.run_study(studies.study(name), out, **options, on_row=print_rows(json))
    except KeyboardInterrupt:
        print_line(f"interrupted; the same command resumes from {out}")
        raise
    hint = f"{len(record.rows)} rows in {out}; plot them with: python -m benchmarks plot study {out}"
    emit(json, record.to_dict(), table(*record.table()), record.conclusion, hint)


@app.command()
def explore(
    out: Annotated[Path, option("Results file, written after every panel.")] = Path("explore.json"),
    json: Json = False,
) -> None:
    """Measure the response time of the explorer to keystrokes, in a browser."""
    from benchmarks.explore import measure

    rows = measure(out)
    cells = [
        (r.panel, r.keys, f"{r.median_ms:.0f}", f"{r.p95_ms:.0f}", f"{r.max_ms:.0f}", _yes(r.meets_target))
        for r in rows
    ]
    columns = ("panel", "keys", "median, ms", "p95, ms", "max, ms", f"p95 ≤ {rows[0].target_ms:g} ms")
    print_results(rows, json, table(columns, cells))


@app.command()
def scaling(
    out: Annotated[Path, option("Output file: .png, .svg or .pdf.", "--out", "-o")] = Path("scaling.png"),
    d: Annotated[int, option("Model dimension.", "--d")] = 64,
    k: Annotated[int, option("Kernel size of the convolution.", "--k")] = 3,
    longest: Annotated[int, option("Maximum length; the other lengths are powers of two.", min=1, max=1 << 24)] = 2048,
    batch: Annotated[int, option("Batch size.", "--batch", "-b")] = 1,
    device: Annotated[str, option("Device to measure on: cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Plot the time of self-attention, recurrence and convolution by length: predicted (lines), measured (dots)."""
    from benchmarks.scaling import lengths, measure_scaling, plot_scaling

    device = resolve_device(device)
    with writing(out, FIGURES):
        steps = lengths(min(32, longest), longest)
        with progress("measuring", hidden=json) as on_step:
            done = count(1)
            sizes: dict[str, Any] = {"k": k, "batch": batch, "device": device}
            result = measure_scaling(d, steps, **sizes, on_point=lambda _: on_step(next(done), 3 * len(steps)))
        path = plot_scaling(result, out)
    rows = [
        (p.layer, f"{p.n:,}", f"{p.flops:,}", f"{1e3 * p.predicted:.3f}", f"{1e3 * (p.measured or 0.0):.3f}")
        for p in result.points
    ]
    output = table(("layer", "n", "FLOPs", "predicted, ms", "measured, ms"), rows)
    emit(json, {**result.to_dict(), "picture": str(path)}, output, f"picture written to {path}")


@app.command()
def cost(
    out: Annotated[Path | None, option("Results file; written after every row.")] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Compare predicted with measured memory and time, for reference models."""
    import torch

    from benchmarks.cost import THIRD_PARTY, cases, document_of, line, missing, worst, write
    from clearhead.analysis.cost.measure import measure_this_machine

    device = resolve_device(device)
    selected_cases = cases("full" if device == "cuda" else "small")
    if not json:
        console.print(f"{len(selected_cases)} cases; measuring the rates of this machine …", markup=False)
        for name in filter(missing, THIRD_PARTY):
            console.print(f"skipping {name}: its library is not installed", markup=False)
    machine = measure_this_machine(device, (getattr(torch, case.dtype) for case in selected_cases))

    def on_row(document: dict[str, Any]) -> None:
        if not json:
            show_picture(line(document["rows"][-1]))
        if out is not None:
            write(document, out)

    document = document_of(selected_cases, machine, on_row=on_row)
    errors = worst(document)
    memory, time = f"{100 * errors['memory']:.1f} %", f"{100 * errors['time']:.1f} %"
    summary = f"{machine.name}: largest error of memory {memory}, of time {time}"
    emit(json, document, summary + ("" if out is None else f"; written to {out}"))


@plot.command("sparse")
def plot_sparse(
    results: Annotated[Path, argument("Results of `python -m benchmarks sparse`.")] = Path("sparse.json"),
    out: Out = Path("sparse.png"),
) -> None:
    """Plot measured time against density of masks."""
    from benchmarks.sparse import draw_sparse

    with writing(out, FIGURES):
        path = draw_sparse(results, out)
    print_line(f"written to {path}")


@plot.command("study")
def plot_study(
    results: Annotated[Path, argument("Results of `python -m benchmarks study`.")],
    out: Annotated[
        Path | None, option("Output file: .png or .svg. Default: the results' name with .png.", "--out", "-o")
    ] = None,
) -> None:
    """Plot a study: one panel per facet, one line per series, and a band over seeds."""
    from benchmarks.studies import read
    from benchmarks.studies.runner import draw_study

    record, out = read(results), out or results.with_suffix(".png")
    with writing(out, FIGURES):
        path = draw_study(record, out)
    print_line(f"written to {path}")


def main() -> None:
    """Run `python -m benchmarks`."""
    run_app(app, "python -m benchmarks")
