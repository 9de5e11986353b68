"""`clearhead check`: is this model right? Every property tested, with the cause of what fails."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.output import A_MODEL, Json, console, show_json, table

if TYPE_CHECKING:
    from clearhead.checks import Report


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(help=f"{A_MODEL} Or package.module:factory, which is imported and called."),
    ],
    only: Annotated[list[str] | None, typer.Option(help="Test only this property; may be given again.")] = None,
    ids: Annotated[int | None, typer.Option(help="It reads token numbers, of a vocabulary of this size.")] = None,
    embeddings: Annotated[int | None, typer.Option(help="It reads vectors of this width, one a token.")] = None,
    values: Annotated[
        str | None, typer.Option(help="It reads blocks of numbers that are no sequence, such as 3,32,32.")
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--not-causal", help="Whether it must not look ahead, as a language model, or may."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the inputs that are tried.")] = 0,
    length: Annotated[int, typer.Option(help="Tokens in an input.", min=1)] = 11,
    json: Json = False,
) -> None:
    """Test a model for future leaks, padding leaks, cache drift, NaN rows and more, and name the cause of what fails.

    The status is 1 if anything fails, or is left undecided because nobody said whether the model may look ahead. What
    an unknown module reads is said by --ids, --embeddings or --values. A factory takes no arguments and returns a
    module, or a clearhead.checks.Subject that says how it is called; a module itself may be named too. Its code is
    imported only then, from the folder you are in."""
    from clearhead.checks import check as run

    how = {"causal": causal, **inputs_of(ids, embeddings, values)}
    report = run(named(model), only=only or None, seed=seed, length=length, **how)
    if json:
        show_json({"model": model, **report.to_dict()})
    else:
        _show(model, report)
    raise typer.Exit(0 if report.ok and not report.undecided else 1)


def _show(model: str, report: Report) -> None:
    from clearhead.checks import Verdict
    from clearhead.checks.report import number

    rows = [
        (f.property, f.verdict.value, number(f.difference), number(f.tolerance))
        for f in report
        if f.verdict is not Verdict.NOT_APPLICABLE
    ]
    console.print(
        table(
            ("property", "verdict", "largest difference", "rounding explains"),
            rows,
            title=f"{model}: {report.name}",
        )
    )
    for finding in report:
        if finding.verdict is Verdict.NOT_APPLICABLE:
            line = f"not applicable: {finding.property}: {finding.cause}"
            console.print(line, markup=False, soft_wrap=True, style="dim")
    for finding in report.failures:
        console.print(f"\n{finding}", markup=False, soft_wrap=True)
    for finding in report.undecided:
        console.print(f"\n{finding}", markup=False, soft_wrap=True, style="bold yellow")


def inputs_of(ids: int | None, embeddings: int | None, values: str | None) -> dict[str, Any]:
    """What the module reads, if it was said: one of the three."""
    from clearhead.checks import Embeddings, Ids, Values
    from clearhead.errors import ConfigError

    said: list[Any] = [Ids(ids)] if ids is not None else []
    said += [Embeddings(embeddings)] if embeddings is not None else []
    if values is not None:
        try:
            said.append(Values(tuple(map(int, values.split(",")))))
        except ValueError:
            raise ConfigError(
                f"--values is {values!r}; expected sizes with commas between them, such as 3,32,32"
            ) from None
    if len(said) > 1:
        raise ConfigError("a module reads one kind of input: give --ids, --embeddings or --values")
    return {"inputs": said[0]} if said else {}


def named(model: str) -> Any:
    """What a name on the command line stands for."""
    from clearhead.pretrained import load_model

    if ":" in model and not model.startswith("hf:") and not Path(model).exists():
        return _imported(model)
    return load_model(model)


def _imported(name: str) -> Any:
    """What `package.module:factory` makes. This runs the user's code, which was asked for by naming it."""
    from torch import nn

    from clearhead.checks import Subject
    from clearhead.errors import ConfigError

    place, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"{place!r} cannot be imported from {here}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{place} has no {attribute!r}; give module:factory, a function that returns the model")
        found = getattr(found, part)
    if isinstance(found, (nn.Module, Subject)):
        return found
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}; expected a function that returns a module")
    try:
        return found()
    except TypeError as error:
        raise ConfigError(f"{name} could not be called without arguments: {error}") from error
