"""`clearhead check`: test the properties of a model and report the cause of failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.module_options import InputDim, InputShape, VocabSize, input_spec, load_named
from clearhead.cli.options import Device, Dtype, Factory, Json, load_kwargs, option
from clearhead.cli.output import console, print_wrapped, progress, show_json, table

if TYPE_CHECKING:
    from clearhead.analysis.checks import CheckReport


@app.command()
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
    """Test a model for causality, padding leaks, cache drift, NaN rows and more, and name the cause of what fails.

    The status is 1 if anything fails, or is left undecided because nobody said whether the model may look ahead. What
    an unknown module reads is said by --ids, --embeddings or --values. A factory takes no arguments and returns a
    module, or a ModuleSpec that describes how it is called; a module itself may be named too. Its code is
    imported only then, from the folder you are in."""
    from clearhead.analysis.checks import check as run

    kwargs: dict[str, Any] = {"causal": causal, **input_spec(vocab_size, input_dim, input_shape)}
    module = load_named(model, **load_kwargs(device, dtype))
    with progress("preparing", hidden=json) as advance:
        kwargs["on_start"] = lambda name, done, total: advance(done, total, name)
        report = run(module, only=only or None, seed=seed, length=length, **kwargs)
    if json:
        show_json({"model": model, **report.to_dict()})
    else:
        _show(model, report)
    raise typer.Exit(0 if report.ok and not report.undecided else 1)


def _show(model: str, report: CheckReport) -> None:
    from clearhead.analysis.checks import Verdict
    from clearhead.analysis.checks.report import number

    rows = [
        (f.property, f.verdict.value, number(f.max_abs_difference), number(f.tolerance))
        for f in report
        if f.verdict is not Verdict.NOT_APPLICABLE
    ]
    console.print(
        table(("property", "verdict", "largest difference", "rounding explains"), rows, title=f"{model}: {report.name}")
    )
    for finding in report:
        if finding.verdict is Verdict.NOT_APPLICABLE:
            print_wrapped(f"not applicable: {finding.property}: {finding.cause}", style="dim")
    for finding in report.failures:
        print_wrapped(f"\n{finding}")
    for finding in report.undecided:
        print_wrapped(f"\n{finding}", style="bold yellow")
