"""Predicted beside measured, for the models and lengths that the project answers for: `python3 -m
clearhead.cost.measure`.

Measures the machine's ceilings first, then predicts and measures each case, and writes one JSON document:

    format    1
    machine   name, device, and the numbers of `clearhead.cost.machine.Machine`
    versions  clearhead, torch, python
    rows      model, tokens, image (side of the picture, or null), batch, dtype, training, parameters, operations,
              predicted and measured: peak_bytes, seconds;   ratio: memory, time (predicted / measured);   limit

Nothing is fitted to a model: a prediction knows the model's configuration and the machine's numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from clearhead._version import __version__
from clearhead.cost.machine import Machine, measure_machine
from clearhead.cost.predict import cost, preset
from clearhead.cost.report import read, worst
from clearhead.cost.trial import measure
from clearhead.models import Config, DecoderConfig, VisionConfig

__all__ = ["Case", "Row", "cases", "compare_with_run", "measure_all", "predict_again", "with_issue"]

FORMAT = 1
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

    def config(self) -> Config:
        config = preset(self.model)
        if isinstance(config, VisionConfig) and self.image is not None:
            return config.replace(image_size=(self.image, self.image))
        return config


@dataclass(frozen=True)
class Row:
    """A case, what was predicted for it and what was measured."""

    case: Case
    tokens: int
    parameters: int
    operations: int
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
        data = asdict(self)
        return {**data.pop("case"), **data, "ratio": self.ratio}


def cases(scale: str = "full") -> tuple[Case, ...]:
    """GPT-2 124M, the base model of 2017 and ViT small at several lengths; "small" is for machines without a GPU."""
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
            ]
    return tuple(found)


def compare_with_run(case: Case, machine: Machine, *, seconds: float = 0.5) -> Row:
    """Predicts a case, runs it on the machine's device, and puts both side by side."""
    run = measure(case.config(), **case.how(), device=machine.device, seconds=seconds)
    if machine.device == "cuda":
        torch.cuda.empty_cache()
    return _row(case, machine, {"peak_bytes": run.peak_bytes, "seconds": run.seconds})


def _row(case: Case, machine: Machine, measured: dict[str, float]) -> Row:
    config = case.config()
    predicted = cost(config, **case.how(), device=machine.device)
    took = predicted.time(machine)
    tokens = predicted.sizes.get("T")
    if tokens is None and isinstance(config, VisionConfig):
        tokens = predicted.sizes["N_p"] + config.pooling.n_extra
    return Row(
        case=case,
        tokens=tokens or 0,
        parameters=predicted.parameters.value,
        operations=predicted.operations.value,
        predicted={"peak_bytes": predicted.memory.peak.value + machine.workspace, "seconds": took.seconds},
        measured=measured,
        limit=took.limit,
    )


def with_issue(machine: Machine, *, rounds: int = 5) -> Machine:
    """The machine's numbers and what its host takes to issue a kernel, and to begin a pass.

    Both come from a model too small to compute anything, at two depths: what the deeper one takes longer is issued. A host
    has slow moments that outlast one timing, so all are timed in turn, `rounds` times over.
    """
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


def measure_all(
    which: Iterable[Case],
    device: str,
    *,
    seconds: float = 0.5,
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """The whole document: machine, versions, rows."""
    which = tuple(which)
    dtypes = tuple(getattr(torch, name) for name in dict.fromkeys(case.dtype for case in which))
    machine = with_issue(measure_machine(device, dtypes))
    rows = []
    for row in _rows(which, machine, seconds):
        rows.append(row.to_dict())
        on_row(row)
    versions = {
        "clearhead": __version__,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    return {"format": FORMAT, "machine": machine.to_dict(), "versions": versions, "rows": rows}


def _rows(which: Iterable[Case], machine: Machine, seconds: float) -> Iterator[Row]:
    for case in which:
        yield compare_with_run(case, machine, seconds=seconds)


def _line(row: Row) -> str:
    case, ratio = row.case, row.ratio
    how = "train" if case.training else "infer"
    size = f"{case.model:<11}{row.tokens:>6}{case.batch:>5}  {case.dtype:<9}{how:<7}"
    peaks = (side["peak_bytes"] / 2**20 for side in (row.predicted, row.measured))
    times = (1e3 * side["seconds"] for side in (row.predicted, row.measured))
    memory = "".join(f"{peak:9.0f}" for peak in peaks) + f" MiB {ratio['memory']:6.3f}"
    seconds = "".join(f"{time:9.2f}" for time in times) + f" ms {ratio['time']:6.3f}"
    return f"{size}{memory}   {seconds}   {row.limit}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python3 -m clearhead.cost.measure", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long to time each case")
    parser.add_argument(
        "--again", type=Path, help="predict again for the measurements in this file; measure nothing"
    )
    options = parser.parse_args(arguments)
    if options.again is not None:
        _write(predict_again(read(options.again)), options.out)
        return
    which = cases("full" if options.device == "cuda" else "small")
    document = measure_all(
        which, options.device, seconds=options.seconds, on_row=lambda row: print(_line(row), flush=True)
    )
    _write(document, options.out)
    machine = document["machine"]
    print(f"{machine['name']}, {machine['bandwidth'] / 1e9:.0f} GB/s, and in TFLOP/s:")
    for what in ("matrix", "odd", "odd_backward", "attention", "attention_backward"):
        rates = (f"{name} {rate / 1e12:.3g}" for name, rate in machine[f"{what}_rate"].items())
        print(f"  {what.replace('_', ' '):<20}{', '.join(rates) or '–'}")
    launch = f"launch {1e6 * machine['launch']:.1f} µs"
    issue = ", ".join(f"{name} {1e6 * seconds:.0f} µs" for name, seconds in machine["issue"].items())
    print(f"{launch}, issuing a kernel {issue or '–'}")
    print(f"off by at most {worst(document)}")


def _write(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
