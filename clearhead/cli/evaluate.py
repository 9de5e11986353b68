"""`clearhead evaluate`: the numbers on a model's card, measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.how import BeamWidth, LengthPenalty, searching
from clearhead.cli.output import Json, console, show_json, table
from clearhead.cli.where import AUTO, FLOAT32, Device, Dtype, placed


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model in the box, or the folder of a run.")],
    data: Annotated[Path | None, typer.Option(help="Where the data lie: the task's folder or file.")] = None,
    beam: BeamWidth = None,
    length_penalty: LengthPenalty = None,
    limit: Annotated[int | None, typer.Option(help="Only the first examples.", min=1)] = None,
    streams: Annotated[
        bool, typer.Option("--streams", help="For speech: streams of digits rather than single ones.")
    ] = False,
    device: Device = AUTO,
    dtype: Dtype = FLOAT32,
    json: Json = False,
) -> None:
    """Loss, perplexity and accuracy on data that the model has not seen; BLEU and chrF for translation.

    For translation a file of pairs is used whole; a folder's dev part otherwise. For speech: single recordings, or
    streams of 3 to 12 with their digit error rate and latency.
    """
    from rich.progress import Progress

    from clearhead import pretrained
    from clearhead.generation import Greedy

    trained = pretrained.load(model, **placed(device, dtype))
    how = searching(beam, length_penalty, Greedy())
    with Progress(console=console, transient=True, disable=json) as progress:
        bar = progress.add_task("evaluating", total=None)
        result = pretrained.evaluate(
            trained,
            data,
            how=how,
            limit=limit,
            streams=streams,
            on_done=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if json:
        show_json(result.to_dict())
        return
    rows = [(name.replace("_", " "), _shown(value)) for name, value in result.to_dict().items()]
    console.print(table(("", ""), rows))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
