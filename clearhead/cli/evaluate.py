"""`clearhead evaluate`: measure the metrics of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import (
    BeamWidth,
    Device,
    Dtype,
    Json,
    ModelCommand,
    Penalty,
    argument,
    decoding_strategy,
    load_kwargs,
    option,
)
from clearhead.cli.output import emit, progress, table


@app.command(cls=ModelCommand)
def evaluate(
    model: Annotated[str, argument("A bundled model, or a run folder.")],
    data: Annotated[Path | None, option("Evaluation data: the folder or file of the task.")] = None,
    beam: BeamWidth = None,
    length_penalty: Penalty = None,
    limit: Annotated[int | None, option("Evaluate only the first N examples.", min=1)] = None,
    streams: Annotated[
        bool, option("For speech: streams of digits instead of single recordings.", "--streams")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Measure loss, perplexity and accuracy on held-out data; BLEU and chrF for translation.

    For translation, a file of pairs is evaluated completely; of a folder, the development set is. For speech: single
    recordings, or streams of 3 to 12 digits with their error rate and latency."""
    from clearhead.generation import Greedy

    trained = hub.pipeline(model, **load_kwargs(device, dtype))
    strategy = decoding_strategy(beam, length_penalty, Greedy())
    with progress("evaluating", hidden=json) as report:
        result = hub.evaluate(trained, data, strategy=strategy, limit=limit, streams=streams, on_done=report)
    rows = [(name.replace("_", " "), _format_value(value)) for name, value in result.to_dict().items()]
    emit(json, result.to_dict(), table(("", ""), rows))


def _format_value(value: object) -> str:
    """Format a number for people."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
