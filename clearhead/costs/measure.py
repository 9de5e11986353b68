"""Predicted beside measured: `clearhead cost … --measure`, for one model or for all that the project answers for.

Measures the machine's ceilings first, then predicts and measures each case. All of it makes one JSON document:

    format    1
    machine   name, device, and the numbers of `clearhead.costs.machine.Machine`
    versions  clearhead, torch, python
    rows      model, tokens, image (side of the picture, or null), batch, dtype, training, parameters, operations,
              predicted and measured: peak_bytes, seconds;   ratio: memory, time (predicted / measured);   limit

Nothing is fitted to a model: a prediction knows the model's configuration and the machine's numbers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from clearhead._version import __version__
from clearhead.costs.machine import Machine, measure_machine
from clearhead.costs.predict import cost
from clearhead.costs.result import Cost
from clearhead.costs.subjects import Model, preset
from clearhead.costs.trial import measure
from clearhead.models import DecoderConfig, VisionConfig

__all__ = [
    "Case",
    "Comparison",
    "Row",
    "beside",
    "cases",
    "compare_with_run",
    "document_of",
    "machine_here",
    "predict_again",
    "with_issue",
]

FORMAT = 1


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def _vit() -> Any:
    from timm import create_model

    return create_model("vit_small_patch16_224")


FOREIGN: dict[str, Callable[[], Any]] = {
    "transformers:gpt2": _gpt2, "transformers:bert-base": _bert, "timm:vit_small_patch16_224": _vit,
}  # fmt: skip
"""Models of other libraries, at the sizes that made them known; by library and name."""

_DEEPER = 8  # times as many layers, where the host's part is told from the rest


@dataclass(frozen=True)
class Case:
    """One model at one size. `image` is the side of the picture, for a vision Transformer, and decides its tokens."""

    model: str
    batch: int
    tokens: int | None = None
    image: int | None = None
    dtype: str = "float32"
    training: bool = True

    def how(self) -> dict[str, Any]:
        """The sizes, as `cost` and `measure` take them."""
        dtype = getattr(torch, self.dtype)
        return {"tokens": self.tokens, "batch": self.batch, "dtype": dtype, "training": self.training}

    def subject(self) -> Any:
        """What is priced and measured: a preset's configuration, or a module of another library's."""
        if self.model in FOREIGN:
            return Model(self.model, FOREIGN[self.model])
        config = preset(self.model)
        if isinstance(config, VisionConfig) and self.image is not None:
            return config.replace(image_size=(self.image, self.image))
        return config


@dataclass(frozen=True)
class Comparison:
    """What was predicted and what was measured: peak_bytes and seconds of each, and what limits the prediction."""

    predicted: dict[str, float]
    measured: dict[str, float]
    limit: str

    @property
    def ratio(self) -> dict[str, float]:
        """Predicted over measured."""
        return {
            "memory": self.predicted["peak_bytes"] / self.measured["peak_bytes"],
            "time": self.predicted["seconds"] / self.measured["seconds"],
        }

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Row:
    """A case and its comparison."""

    case: Case
    tokens: int
    parameters: int
    operations: int
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.case),
            "tokens": self.tokens,
            "parameters": self.parameters,
            "operations": self.operations,
            **self.comparison.to_dict(),
        }


def cases(scale: str = "full") -> tuple[Case, ...]:
    """GPT-2 124M, the base model of 2017 and ViT small at several lengths, and their likes of other libraries where those
    are installed; "small" is for machines without a GPU."""
    if scale == "small":
        return tuple(
            case
            for training in (True, False)
            for case in (
                Case("tiny-decoder", 32, 61, training=training),
                Case("tiny-encoder-decoder", 32, 61, training=training),
                Case("tiny-vision", 32, training=training),
            )
        )
    found = []
    for dtype, more in (("float32", 1), ("bfloat16", 2)):
        for training in (True, False):
            case = partial(Case, dtype=dtype, training=training)
            found += [
                case("gpt2", 16 * more, 256),
                case("gpt2", 8 * more, 512),
                case("gpt2", 8 * more, 1024),
                case("base", 64 * more, 128),
                case("base", 32 * more, 512),
                case("base", 8 * more, 2048),
                case("vit-small", 128 * more, image=224),
                case("vit-small", 32 * more, image=384),
                case("vit-small", 16 * more, image=512),
                case("transformers:gpt2", 8 * more, 1024),
                case("transformers:bert-base", 32 * more, 512),
                case("timm:vit_small_patch16_224", 128 * more),
            ]
    return tuple(case for case in found if not missing(case.model))


def missing(model: str) -> bool:
    """Whether the library of a foreign model is not installed here."""
    return model in FOREIGN and importlib.util.find_spec(model.partition(":")[0]) is None


def beside(predicted: Cost, machine: Machine, measured: dict[str, float]) -> Comparison:
    """A prediction for this machine beside what was measured on it."""
    took = predicted.time(machine)
    peak = predicted.memory.peak.value + machine.workspace
    return Comparison({"peak_bytes": peak, "seconds": took.seconds}, measured, took.limit)


def compare_with_run(case: Case, machine: Machine, *, seconds: float = 0.5) -> Row:
    """Predicts a case, runs it on the machine's device, and puts both side by side."""
    run = measure(case.subject(), **case.how(), device=machine.device, seconds=seconds)
    if machine.device == "cuda":
        torch.cuda.empty_cache()
    return _row(case, machine, asdict(run))


def _row(case: Case, machine: Machine, measured: dict[str, float]) -> Row:
    predicted = cost(case.subject(), **case.how(), device=machine.device)
    looks = predicted.log.looks
    return Row(
        case=case,
        tokens=predicted.sizes.get("T") or (looks[0].queries if looks else 0),
        parameters=predicted.parameters.value,
        operations=predicted.operations.value,
        comparison=beside(predicted, machine, measured),
    )


def machine_here(device: str, dtypes: Iterable[torch.dtype]) -> Machine:
    """All numbers of this machine that predictions for these dtypes ask for."""
    return with_issue(measure_machine(device, tuple(dict.fromkeys(dtypes))))


def with_issue(machine: Machine, *, rounds: int = 5) -> Machine:
    """The machine's numbers and what its host takes to issue a kernel, and to begin a pass.

    Both come from a model too small to compute anything, at two depths: what the deeper one takes longer is issued. A
    host has slow moments that outlast one timing, so all are timed in turn, `rounds` times over."""
    if machine.device == "cpu":
        return machine  # it issues nothing: it computes
    tiny = preset("tiny-decoder")
    assert isinstance(tiny, DecoderConfig)
    depths = [tiny, tiny.replace(n_layers=_DEEPER * tiny.n_layers)]
    how = Case("tiny-decoder", 1, 8).how()
    cases = [(config, how | {"training": training}) for training in (False, True) for config in depths]
    took: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for times, (config, sizes) in zip(took, cases, strict=True):
            times.append(measure(config, **sizes, device=machine.device, seconds=0.2).seconds)
    launches = [cost(config, **sizes, device=machine.device).n_launches for config, sizes in cases]
    issue, begin = {}, {}
    for name, (small, deep) in (("forward", (0, 1)), ("training", (2, 3))):
        shorter, longer = median(took[small]), median(took[deep])
        issue[name] = max(0.0, longer - shorter) / (launches[deep] - launches[small])
        begin[name] = max(0.0, shorter - issue[name] * launches[small])
    return replace(machine, issue=issue, begin=begin)


def predict_again(document: dict[str, Any]) -> dict[str, Any]:
    """The same measurements of the same machine beside what is predicted now."""
    machine = Machine.from_dict(document["machine"])
    names = Case.__dataclass_fields__
    rows = []
    for row in document["rows"]:
        case = Case(**{name: row[name] for name in names})
        if case.image is not None:
            case = replace(case, tokens=None)
        rows.append(_row(case, machine, row["measured"]).to_dict())
    return {**document, "rows": rows}


def document_of(
    which: Iterable[Case],
    machine: Machine,
    *,
    seconds: float = 0.5,
    on_row: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The whole document: machine, versions, rows. `on_row` is shown what there is of it after each row."""
    versions = {
        "clearhead": __version__,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    document: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine.to_dict(),
        "versions": versions,
        "rows": [],
    }
    for case in which:
        document["rows"].append(compare_with_run(case, machine, seconds=seconds).to_dict())
        on_row(document)
    return document
