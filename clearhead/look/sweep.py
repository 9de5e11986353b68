"""Many small changes to one run, side by side in a batch: patching from another run, and ablation.

Each cell of a grid is the run with one thing changed: what one module gives at one position, what one head gives, or
what a whole module gives. A batch holds a copy of the input for each cell, and one pass computes them all; the model
runs as it always does, and the edits are those of `look.trace`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.errors import ConfigError, ShapeError
from clearhead.look.chart import Chart, HasCharts, pad_ragged, strip_common_prefix
from clearhead.look.edit import Intervention
from clearhead.look.question import LogitMetric, Metric, ModelArgs, input_tensors, repeat_batch, run_logits
from clearhead.look.record import CallContext
from clearhead.look.stream import record_residual_stream
from clearhead.look.trace import Trace, trace
from clearhead.values import require

Granularity = Literal["position", "head", "module"]
_DIMS = {"position": -2, "head": -3}  # of what is changed
_BUDGET = 1 << 30  # bytes that the runs of one pass may take, about


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchingResult(HasCharts):
    """A metric for every module (`rows`, by path) and position or head (`columns`); NaN where a module has fewer.

    `plain` is the metric of the run that was changed, `source` that of a patch's clean run; NaN for an ablation."""

    method: str
    rows: tuple[str, ...]
    granularity: Granularity
    columns: tuple[int, ...]
    values: Tensor  # (R, C), float64
    baseline: float
    clean: float = math.nan

    @property
    def change(self) -> Tensor:
        """(R, C): how far each change moved the metric."""
        return self.values - self.baseline

    @property
    def restored(self) -> Tensor:
        """(R, C): of a patch, the share of the way from the corrupted run's metric to the clean one's."""
        if not abs(self.clean - self.baseline) > 0:
            raise ConfigError(
                f"the metric is {self.baseline:.6g} in the run that was changed and {self.clean:.6g} in the other: "
                "there is no way to measure shares of; look at `change`"
            )
        return self.change / (self.clean - self.baseline)

    def charts(self, tokens: Sequence[str] | None = None) -> list[Chart]:
        """How far each change moved the metric: as shares of the way to the clean run, where there is one to go."""
        is_patch = abs(self.clean - self.baseline) > 0
        columns = ["change"] if self.granularity == "module" else list(map(str, self.columns))
        if self.granularity == "position" and tokens is not None and len(tokens) == len(columns):
            columns = list(tokens)
        way = f"from {self.baseline:.4g}, corrupted, to {self.clean:.4g}, clean"
        note = (
            f"1 brings the answer all the way {way}." if is_patch else f"The answer's change from {self.baseline:.4g}."
        )
        what = {"position": "each module and position", "head": "each head", "module": "each module"}[self.granularity]
        title = f"With {what} from the clean run" if self.method == "patched" else f"Without {what}"
        values = self.restored if is_patch else self.change
        return [
            Chart(
                title=title, rows=strip_common_prefix(self.rows), columns=columns, values=values, signed=True, note=note
            )
        ]

    def to_dict(self) -> dict[str, Any]:
        """Every number with its place as plain values, for JSON."""
        names = {"rows": list(self.rows), "columns": list(self.columns)}
        values = [[None if v != v else v for v in row] for row in self.values.tolist()]
        return {**vars(self), **names, "values": values, "clean": None if math.isnan(self.clean) else self.clean}


def patch(
    model: nn.Module,
    clean: ModelArgs,
    corrupted: ModelArgs,
    metric: Metric | None = None,
    *,
    modules: str | None = None,
    granularity: Granularity = "position",
    batch: int | None = None,
) -> PatchingResult:
    """The corrupted run with one thing at a time taken from the clean run, and the metric of each.

        grid = look.patch(model, clean_ids, corrupted_ids, look.LogitMetric(token=17, baseline=4))
        grid.restored                          # (blocks, positions): 1 where that alone brings the answer back
        look.patch(model, clean_ids, corrupted_ids, granularity="head")

    Without `modules`, the blocks that lead to the logits are patched, or with `granularity="head"` their attention
    layers. `modules` is a pattern, such as "encoder.blocks.*". `metric` makes a number of logits; by default it is the
    logit of the clean run's first choice. `batch` bounds how many runs go through the model at once."""
    shapes = [[tuple(x.shape) for x in input_tensors(given)] for given in (clean, corrupted)]
    if shapes[0] != shapes[1]:
        raise ShapeError(
            f"the clean input is {shapes[0]} and the corrupted one {shapes[1]}; positions are patched one by one, so "
            "give two inputs of the same length"
        )
    source, logits = _recorded(model, clean, modules, granularity, "blocks")
    metric = _metric(metric, logits)
    found = _swept(model, corrupted, source, granularity, metric, batch, lambda x: x)
    return PatchingResult(method="patched", granularity=granularity, clean=_number(metric(logits)), **found)


def ablate(
    model: nn.Module,
    given: ModelArgs,
    metric: Metric | None = None,
    *,
    modules: str | None = None,
    granularity: Granularity = "head",
    to: Literal["zero", "mean"] = "zero",
    batch: int | None = None,
) -> PatchingResult:
    """A run with one head, module or position at a time put out, and the metric of each.

        grid = look.ablate(model, ids, look.LogitMetric(token=17))
        grid.change                            # (layers, heads): what the answer loses or gains without each
        look.ablate(model, ids, granularity="module", modules="blocks.*.feed_forward")

    Put out means zeros, or with `to="mean"` the mean of the same over all positions (and sequences) of this run.
    Without `paths`, these are all heads; with another `over`, the attention and feed-forward layers."""
    require(to in ("zero", "mean"), f"to is {to!r}; expected 'zero' or 'mean'")
    source, logits = _recorded(model, given, modules, granularity, "contributors")

    def put_out(x: Tensor) -> Tensor:
        return torch.zeros_like(x) if to == "zero" else x.mean(0 if x.dim() < 3 else (0, -2), keepdim=True).expand_as(x)

    return PatchingResult(
        method="ablated",
        granularity=granularity,
        **_swept(model, given, source, granularity, _metric(metric, logits), batch, put_out),
    )


def _recorded(
    model: nn.Module,
    given: ModelArgs,
    modules: str | None,
    granularity: Granularity,
    default: Literal["blocks", "contributors"],
) -> tuple[Trace, Tensor]:
    """A trace of a run with what the modules gave that are swept over, and its logits."""
    require(
        granularity in ("position", "head", "module"),
        f"granularity is {granularity!r}; expected 'position', 'head' or 'module'",
    )
    found = [modules] if modules else []
    if modules is None:
        with trace(model) as seen:
            stream = record_residual_stream(model, given)
        within = tuple(f"{block}." for block in stream.blocks)
        attention_layers = [path for path in seen.paths if f"{path}.".startswith(within)]
        found = attention_layers if granularity == "head" else getattr(stream, default)
    require(
        bool(found),
        f"nothing to change was found for granularity={granularity!r}; name modules with paths, or another granularity",
    )
    with trace(model, *(f"{path}.{'weights' if granularity == 'head' else 'output'}" for path in found)) as source:
        return source, run_logits(model, given)


def _metric(metric: Metric | None, logits: Tensor) -> Metric:
    if metric is None or isinstance(metric, LogitMetric):
        return (metric or LogitMetric()).resolve(logits)
    return metric


@dataclass(frozen=True, kw_only=True, eq=False)
class PerRowEdit(Intervention):
    """A change of its own for each copy of the input in a batch: it takes one place along `dim`, or all, of `value`."""

    copies: int
    places: list[tuple[int, int]]  # which copy, and which place
    value: Tensor
    dim: int | None

    def new(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        raise NotImplementedError  # every copy has its own

    def apply(self, x: Tensor, moment: CallContext) -> Tensor:
        changed = x.clone().unflatten(0, (self.copies, -1))
        for copy, i in self.places:
            mine, new = (x if self.dim is None else x.select(self.dim, i) for x in (changed[copy], self.value))
            mine.copy_(new)
        return changed.flatten(0, 1)


def _swept(
    model: nn.Module,
    given: ModelArgs,
    source: Trace,
    granularity: Granularity,
    metric: Metric,
    batch: int | None,
    change: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """The metric of one input's run, and under every change; `change` makes it of what the source had there."""
    once = f"batch is {batch}; expected how many runs may go through the model at once, 1 or more"
    require(batch is None or batch >= 1, once)
    heads, dim = slice(None) if granularity == "head" else None, _DIMS.get(granularity)
    found, gave = (source.outputs, source.output) if heads is None else (source.paths, source.heads)
    before, cells = run_logits(model, given), [(path, i) for path in found for i in range(_many(path, gave(path), dim))]
    # What one run takes, about: its logits, with room to choose from them, and a block at work.
    size = before.element_size() * (4 * before.numel() + 32 * gave(found[0]).numel())
    at_once = batch or max(1, _BUDGET // size)
    numbers: dict[str, list[float]] = {path: [] for path in found}
    for start in range(0, len(cells), at_once):
        some = cells[start : start + at_once]
        with trace(model, "output") as t:
            for path in dict.fromkeys(path for path, _ in some):
                places = [(copy, i) for copy, (own, i) in enumerate(some) if own == path]
                t.intervene(
                    path, PerRowEdit(copies=len(some), places=places, value=change(gave(path)), dim=dim, heads=heads)
                )
            logits = run_logits(model, repeat_batch(given, len(some)))
        for (path, _), rows in zip(some, logits.chunk(len(some)), strict=True):
            numbers[path].append(_number(metric(rows)))
    values = pad_ragged(numbers.values())
    baseline, columns = _number(metric(before)), tuple(range(values.shape[1]))
    return {"rows": tuple(found), "columns": columns, "values": values, "baseline": baseline}


def _many(path: str, x: Tensor, dim: int | None) -> int:
    """How many changes there are of what a module gave."""
    if x.dim() < 3 and dim is not None:
        raise ShapeError(
            f"{path or 'the model'} gives {tuple(x.shape)}, which has no positions; use granularity='module'"
        )
    return 1 if dim is None else x.shape[dim]


def _number(found: Any) -> float:
    if isinstance(found, Tensor) and found.numel() != 1:
        raise ShapeError(
            f"the metric gave {tuple(found.shape)}; expected one number for the logits of one input, such as "
            "look.Answer(token=…) gives"
        )
    return float(found)
