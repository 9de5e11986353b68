"""`clearhead evaluate`: the numbers on a model's card, measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import BeamWidth, Device, Dtype, Json, Penalty, argument, option, placed, searching
from clearhead.cli.output import answer, progress, table


@app.command()
def evaluate(
    model: Annotated[str, argument("A model in the box, or the folder of a run.")],
    data: Annotated[Path | None, option("Where the data lie: the task's folder or file.")] = None,
    beam: BeamWidth = None,
    length_penalty: Penalty = None,
    limit: Annotated[int | None, option("Only the first examples.", min=1)] = None,
    streams: Annotated[bool, option("For speech: streams of digits rather than single ones.", "--streams")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Loss, perplexity and accuracy on data that the model has not seen; BLEU and chrF for translation.

    For translation a file of pairs is used whole; a folder's dev part otherwise. For speech: single recordings, or
    streams of 3 to 12 with their digit error rate and latency."""
    from clearhead.generation import Greedy

    trained = pretrained.load(model, **placed(device, dtype))
    how = searching(beam, length_penalty, Greedy())
    with progress("evaluating", hidden=json) as told:
        result = pretrained.evaluate(trained, data, strategy=how, limit=limit, streams=streams, on_done=told)
    rows = [(name.replace("_", " "), _shown(value)) for name, value in result.to_dict().items()]
    answer(json, result.to_dict(), table(("", ""), rows))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
