"""`clearhead check`: test the properties of a model and report the cause of failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.module_options import InputDim, InputShape, VocabSize, input_spec, load_named
from clearhead.cli.options import Device, Dtype, Factory, Json, ModelCommand, load_kwargs, option
from clearhead.cli.output import console, print_wrapped, progress, show_json, table

if TYPE_CHECKING:
    from clearhead.analysis.checks import CheckReport


@app.command(cls=ModelCommand)
def check(
    model: Factory,
    only: Annotated[list[str] | None, option("Test only this property. Repeatable.")] = None,
    vocab_size: VocabSize = None,
    input_dim: InputDim = None,
    input_shape: InputShape = None,
    causal: Annotated[
        bool | None, option("Whether the model must be causal (a language model) or not.", "--causal/--not-causal")
    ] = None,
    seed: Annotated[int, option("Random seed of the test inputs.")] = 0,
    length: Annotated[int, option("Number of tokens of the test inputs.", min=1)] = 11,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Test a model for causality, padding leaks, cache drift, NaN rows and more, and name the cause of each failure.

    Exit status 1 if a test fails, or is undecided because neither --causal nor --not-causal was given. Describe the
    inputs of an unknown module with --vocab-size, --input-dim or --input-shape. A factory takes no arguments and
    returns a module, or a ModuleSpec that describes how it is called; the name of a module works too. It is imported
    from the current folder."""
    from clearhead.analysis.checks import check as run

    inputs = input_spec(vocab_size, input_dim, input_shape)
    module = load_named(model, load_kwargs(device, dtype))
    with progress("preparing", hidden=json) as advance:
        report = run(
            module,
            only=only or None,
            seed=seed,
            length=length,
            causal=causal,
            on_start=lambda name, completed, total: advance(completed, total, name),
            **inputs,
        )
    if json:
        show_json({"model": model, **report.to_dict()})
    else:
        _show(model, report)
    raise typer.Exit(0 if report.ok and not report.undecided else 1)


def _show(model: str, report: CheckReport) -> None:
    """Print the result of every test and the cause of each failure."""
    from clearhead.analysis.checks import Verdict
    from clearhead.analysis.checks.check_report import number

    rows = [
        (f.property, f.verdict.value, f.describe_value(), number(f.tolerance))
        for f in report
        if f.verdict is not Verdict.NOT_APPLICABLE
    ]
    columns = ("property", "verdict", "measured", "rounding explains")
    console.print(table(columns, rows, title=f"{model}: {report.name}"))
    for finding in report:
        if finding.verdict is Verdict.NOT_APPLICABLE:
            print_wrapped(f"not applicable: {finding.property}: {finding.cause}", style="dim")
    for finding in report.failures:
        print_wrapped(f"\n{finding}")
    for finding in report.undecided:
        print_wrapped(f"\n{finding}", style="bold yellow")
