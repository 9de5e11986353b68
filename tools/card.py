"""Write the measured half of a model card: `python tools/card.py NAME [DATA]`.

Description, data, license, training command and time are written by hand; metrics are those of `clearhead evaluate`
and are only written by this tool.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from clearhead._core.atomic_io import write_atomically
from clearhead.hub.bundled import CARD, read_card
from clearhead.hub.evaluate import Evaluation, evaluate
from clearhead.hub.pipelines import Pipeline, pipeline
from clearhead.hub.translate import DEFAULT_STRATEGY

# In the order they are written; those after `measured` come from the model itself.
WRITTEN = ("description", "data", "license", "command", "trained_on", "train_seconds")


def measure(trained: Pipeline, data: str | Path | None) -> dict[str, Any]:
    """Return the card of a model with freshly measured metrics."""
    card = {key: value for key, value in read_card(trained.folder).items() if key in WRITTEN}
    first = "validation" if trained.task == "digits" else "greedy"
    results = {first: evaluate(trained, data)}
    if trained.task == "speech":
        results["streams"] = evaluate(trained, data, streams=True)
    if trained.task == "translation":
        results["beam 5"] = evaluate(trained, data, strategy=DEFAULT_STRATEGY)
    return {
        **card,
        "task": trained.task,
        "preset": trained.recipe.preset,
        "seed": trained.recipe.train.seed,
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "summary": summary(results),
        "metrics": {name: _metrics(result) for name, result in results.items()},
    }


def summary(results: dict[str, Evaluation]) -> str:
    """Return the most important metric, for tables."""
    greedy = next(iter(results.values()))
    if greedy.bleu is not None:
        return ", ".join(f"BLEU {result.bleu:.1f} ({name})" for name, result in results.items())
    if greedy.exact_match is not None:
        return f"{greedy.exact_match:.2%} of outputs exact"
    if greedy.task == "speech":
        streams = results["streams"]
        return f"{greedy.accuracy:.2%} of single digits right, {streams.digit_error_rate:.2%} wrong in streams"
    if greedy.task == "text":
        return f"validation loss {greedy.loss:.3f} nats"
    return f"validation accuracy {greedy.accuracy:.2%}"


def _metrics(result: Evaluation) -> dict[str, Any]:
    return {key: value for key, value in result.to_dict().items() if key not in ("model", "task")}


def to_toml(card: dict[str, Any]) -> str:
    """Format a card as TOML: plain values first, then one table per measurement."""
    lines = [f"{key} = {_value(value)}" for key, value in card.items() if not isinstance(value, dict)]
    for name, metrics in card["metrics"].items():
        lines += ["", f'[metrics."{name}"]', *(f"{key} = {_value(value)}" for key, value in metrics.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    # JSON strings and numbers are valid TOML.
    return json.dumps(value, ensure_ascii=False)


def main(arguments: list[str]) -> None:
    name, data = arguments[0], arguments[1] if len(arguments) > 1 else None
    trained = pipeline(name)
    card = measure(trained, data)
    write_atomically(trained.folder / CARD, to_toml(card).encode())
    print(f"{name}: {card['summary']}")


if __name__ == "__main__":
    main(sys.argv[1:])
