"""Predicted and measured cost of reference models: `python -m benchmarks cost --out FILE`.

One JSON document:

    format    1
    machine   name, device, and the rates of `clearhead.analysis.cost.Machine`
    versions  clearhead, torch, python
    rows      model, tokens, image (image size, or null), batch, dtype, training, parameters, flops,
              predicted and measured: peak_bytes, seconds;   ratio: memory, time (predicted / measured);   bottleneck

Predictions depend only on the recorded operations of the module and on the rates of the machine; nothing is fitted to
a model.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import reading, versions
from clearhead._core.atomic_io import write_atomically
from clearhead.analysis.cost import Machine, cost, preset
from clearhead.analysis.cost.measure import compare_with_measured, measure
from clearhead.analysis.cost.predict import ModelBuilder
from clearhead.errors import StorageError
from clearhead.models import VisionConfig

FORMAT = 1


def _transformers(model: str, config: str) -> Any:
    """Build a transformers model with its default configuration."""
    library = importlib.import_module("transformers")
    return getattr(library, model)(getattr(library, config)())


THIRD_PARTY: dict[str, Callable[[], Any]] = {
    "transformers:gpt2": partial(_transformers, "GPT2LMHeadModel", "GPT2Config"),
    "transformers:bert-base": partial(_transformers, "BertModel", "BertConfig"),
    "timm:vit_small_patch16_224": lambda: importlib.import_module("timm").create_model("vit_small_patch16_224"),
}
"""Models of other libraries at their published sizes, by library and name."""


@dataclass(frozen=True)
class Case:
    """One model at one size; for a vision Transformer `image`, the image size, determines the number of tokens."""

    model: str
    batch: int
    tokens: int | None = None
    image: int | None = None
    dtype: str = "float32"
    training: bool = True

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `cost` and `measure`."""
        dtype = getattr(torch, self.dtype)
        return {"tokens": self.tokens, "batch": self.batch, "dtype": dtype, "training": self.training}

    def build(self) -> Any:
        """Return the configuration of a preset, or the builder of a third-party model."""
        if self.model in THIRD_PARTY:
            return ModelBuilder(self.model, THIRD_PARTY[self.model])
        config = preset(self.model)
        if isinstance(config, VisionConfig) and self.image is not None:
            return config.replace(image_size=(self.image, self.image))
        return config


# Batch size in float32 (doubled in bfloat16), tokens, image size.
_SIZES: dict[str, tuple[tuple[int, int | None, int | None], ...]] = {
    "gpt2": ((16, 256, None), (8, 512, None), (8, 1024, None)),
    "base": ((64, 128, None), (32, 512, None), (8, 2048, None)),
    "vit-small": ((128, None, 224), (32, None, 384), (16, None, 512)),
    "transformers:gpt2": ((8, 1024, None),),
    "transformers:bert-base": ((32, 512, None),),
    "timm:vit_small_patch16_224": ((128, None, None),),
}


def cases(scale: str = "full") -> tuple[Case, ...]:
    """Return GPT-2 124M, the original base Transformer and ViT small at several lengths, and the same models of
    installed third-party libraries; "small" returns tiny models for machines without a GPU."""
    if scale == "small":
        tiny = (("tiny-decoder", 61), ("tiny-encoder-decoder", 61), ("tiny-vision", None))
        return tuple(Case(name, 32, n, training=training) for training in (True, False) for name, n in tiny)
    return tuple(
        Case(model, batch * factor, tokens, image, dtype, training)
        for dtype, factor in (("float32", 1), ("bfloat16", 2))
        for training in (True, False)
        for model, sizes in _SIZES.items()
        if not missing(model)
        for batch, tokens, image in sizes
    )


def missing(model: str) -> bool:
    """Return whether the model is third-party and its library is not installed."""
    return model in THIRD_PARTY and importlib.util.find_spec(model.partition(":")[0]) is None


def row_of(
    case: Case, machine: Machine, measured: dict[str, float] | None = None, *, seconds: float = 0.5
) -> dict[str, Any]:
    """Return a case with its prediction, compared with `measured` or with a new measurement on the machine's device."""
    if measured is None:
        measured = asdict(measure(case.build(), **case.options(), device=machine.device, seconds=seconds))
        if machine.device == "cuda":
            torch.cuda.empty_cache()
    predicted = cost(case.build(), **case.options(), device=machine.device)
    records = predicted.log.attention
    sums = {"parameters": predicted.parameters.value, "flops": predicted.flops.value}
    tokens = predicted.sizes.get("T") or (records[0].queries if records else 0)
    return {**asdict(case), "tokens": tokens, **sums, **compare_with_measured(predicted, machine, measured)}


def document_of(
    selected_cases: Iterable[Case],
    machine: Machine,
    *,
    seconds: float = 0.5,
    on_row: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Return machine, versions and rows; `on_row` is called with the document so far after each row."""
    document: dict[str, Any] = {"format": FORMAT, "machine": machine.to_dict(), "versions": versions(), "rows": []}
    for case in selected_cases:
        document["rows"].append(row_of(case, machine, seconds=seconds))
        on_row(document)
    return document


def predict_again(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with its measurements and new predictions, except rows whose library is missing."""
    machine = Machine.from_dict(document["machine"])
    rows = []
    for row in document["rows"]:
        case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
        if case.image is not None or case.model.startswith("timm"):
            case = replace(case, tokens=None)
        rows.append(row if missing(case.model) else row_of(case, machine, row["measured"]))
    return {**document, "rows": rows}


# ---------------------------------------------------------------------- the results file, and the README's table


def write(document: dict[str, Any], path: str | Path) -> None:
    """Write the results document atomically."""
    write_atomically(Path(path), (json.dumps(document, indent=1) + "\n").encode())


def read(path: str | Path) -> dict[str, Any]:
    """Return the results document of a file; raise StorageError if it is not one."""
    hint = "write it with python -m benchmarks cost --out FILE"
    with reading(Path(path), "results", hint):
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("format") != FORMAT or "rows" not in document:
        raise StorageError(f"{path} does not contain cost results of format {FORMAT}; {hint}")
    return document


def line(row: dict[str, Any]) -> str:
    """Format a row for the terminal: predicted, measured and ratio, of memory and of time."""
    mode = "train" if row["training"] else "infer"
    size = f"{row['model']:<27}{row['tokens']:>6}{row['batch']:>5}  {row['dtype']:<9}{mode:<7}"
    sides = (row["predicted"], row["measured"])
    memory = "".join(f"{side['peak_bytes'] / 2**20:9.0f}" for side in sides)
    seconds = "".join(f"{1e3 * side['seconds']:9.2f}" for side in sides)
    ratio = row["ratio"]
    return f"{size}{memory} MiB {ratio['memory']:6.3f}   {seconds} ms {ratio['time']:6.3f}   {row['bottleneck']}"


def summary(document: dict[str, Any]) -> str:
    """Return a Markdown table with one line per model, dtype and mode: sizes, and the range of the ratios."""
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        groups.setdefault((row["model"], row["dtype"], row["training"]), []).append(row)
    lines = [
        "| model | | tokens | peak memory, predicted / measured | time, predicted / measured |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (model, dtype, training), rows in groups.items():
        tokens = ", ".join(f"{row['tokens']:,}" for row in rows)
        cells = [_range([row["ratio"][quantity] for row in rows]) for quantity in ("memory", "time")]
        mode = f"{dtype}, {'training' if training else 'inference'}"
        lines.append(f"| `{model}` | {mode} | {tokens} | {cells[0]} | {cells[1]} |")
    name, torch_version = document["machine"]["name"], document["versions"]["torch"]
    n_close = sum(abs(row["ratio"]["time"] - 1) <= 0.2 for row in document["rows"])
    memory, time = f"{100 * worst(document)['memory']:.1f} % everywhere", f"{n_close} of {len(document['rows'])} cases"
    lines += ["", f"Measured on one {name}, torch {torch_version}: memory within {memory}, time within 20 % in {time}."]
    return "\n".join(lines)


def _range(ratios: list[float]) -> str:
    """Format minimum and maximum."""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def worst(document: dict[str, Any]) -> dict[str, float]:
    """Return the largest deviation of a ratio from 1, for memory and for time."""
    return {key: max(abs(row["ratio"][key] - 1.0) for row in document["rows"]) for key in ("memory", "time")}
