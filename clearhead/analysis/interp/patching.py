"""Activation patching and ablation: many single changes to one run, computed in batches.

Each cell of the result is the run with one change: the output of a module at one position, of one head, or of a whole
module. A batch contains a copy of the input for each cell, so that one pass computes all of them; the model runs
unchanged, and the changes are interventions of `ch.trace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from clearhead._core.json_types import JSONObject
from clearhead._core.keywords import explain_keywords
from clearhead._core.validation import require
from clearhead.analysis.inputs.model_inputs import ModelArgs, input_tensors, repeat_batch, run_logits
from clearhead.analysis.inputs.pipelines import resolve_inputs
from clearhead.analysis.interp.metric import LogitMetric, Metric
from clearhead.analysis.interp.residual_stream import record_residual_stream
from clearhead.analysis.tracing.activation_store import CallContext
from clearhead.analysis.tracing.edits import Intervention
from clearhead.analysis.tracing.trace import Trace, trace
from clearhead.analysis.views.chart import Chart, HasCharts, pad_ragged, strip_common_prefix
from clearhead.errors import ConfigError, ShapeError
from clearhead.hub import Pipeline

Granularity = Literal["position", "head", "module"]
_DIMS = {"position": -2, "head": -3}  # of the changed activation
_BUDGET = 1 << 30  # approximate bytes of one batched pass


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchingResult(HasCharts):
    """The metric after a change of every module at every position or head.

    `baseline` is the metric of the unchanged run, `clean` that of a patch's clean run; NaN for an ablation.

    Args:
        method: Name of the experiment.
        rows: Paths of the modules.
        granularity: Whether the columns are positions or heads.
        columns: Positions or heads.
        values: The metric after each change, (R, C); NaN if a module has fewer heads.
        baseline: The metric of the unchanged run.
        clean: The metric of a patch's clean run; NaN for an ablation.
        tokens: The changed text, if a text was given.
    """

    method: str
    rows: tuple[str, ...]
    granularity: Granularity
    columns: tuple[int, ...]
    values: Tensor  # (R, C), float64
    baseline: float
    clean: float = math.nan
    tokens: tuple[str, ...] = ()  # the changed text, if a text was given

    @property
    def change(self) -> Tensor:
        """Change of the metric by each cell, (R, C)."""
        return self.values - self.baseline

    @property
    def restored(self) -> Tensor:
        """(R, C), of a patch: the share of the metric's difference to the clean run that a cell restores."""
        if not abs(self.clean - self.baseline) > 0:
            raise ConfigError(
                f"the metric is {self.baseline:.6g} in the changed run and {self.clean:.6g} in the clean run, so "
                "`restored` is undefined; use `change`"
            )
        return self.change / (self.clean - self.baseline)

    def charts(self, tokens: Sequence[str] | None = None) -> list[Chart]:
        """Return a chart of the change of the metric, as shares of the difference to the clean run if there is one."""
        is_patch = abs(self.clean - self.baseline) > 0
        tokens = self.tokens if tokens is None else tokens
        columns = ["change"] if self.granularity == "module" else list(map(str, self.columns))
        if self.granularity == "position" and tokens is not None and len(tokens) == len(columns):
            columns = list(tokens)
        values_text = f"from {self.baseline:.4g}, corrupted, to {self.clean:.4g}, clean"
        note = (
            f"1 restores the metric fully, {values_text}."
            if is_patch
            else f"Change of the metric from {self.baseline:.4g}."
        )
        target = {"position": "each module and position", "head": "each head", "module": "each module"}[
            self.granularity
        ]
        title = f"Patching {target} from the clean run" if self.method == "patched" else f"Ablation of {target}"
        values = self.restored if is_patch else self.change
        return [
            Chart(
                title=title, rows=strip_common_prefix(self.rows), columns=columns, values=values, signed=True, note=note
            )
        ]

    def to_dict(self) -> JSONObject:
        """Return all values as plain data for JSON."""
        names = {"rows": list(self.rows), "columns": list(self.columns), "tokens": list(self.tokens)}
        values = [[None if v != v else v for v in row] for row in self.values.tolist()]
        return {**vars(self), **names, "values": values, "clean": None if math.isnan(self.clean) else self.clean}


@explain_keywords
def patch(
    model: nn.Module | Pipeline,
    clean: ModelArgs | str,
    corrupted: ModelArgs | str,
    metric: Metric | None = None,
    *,
    modules: str | None = None,
    granularity: Granularity = "position",
    positions: Sequence[int] | None = None,
    batch: int | None = None,
) -> PatchingResult:
    """Patch activations of the clean run into the corrupted run, one at a time, and measure each run.

        result = analysis.patch(model, clean_ids, corrupted_ids, analysis.LogitMetric(token=17, baseline=4))
        result.restored                        # (blocks, positions): 1 if that activation alone restores the metric
        analysis.patch(model, clean_ids, corrupted_ids, granularity="head")

    Args:
        model: Model in evaluation mode, or a pipeline, whose inputs may be texts.
        clean: Input of the clean run.
        corrupted: Input of the corrupted run, of the same shape.
        metric: Function from logits to a number; default: the logit of the clean run's top prediction.
        modules: Pattern such as "encoder.blocks.*"; default: the blocks that lead to the logits, or their attention
            layers if `granularity` is "head".
        granularity: "position", "head" or "module".
        positions: Positions to patch if `granularity` is "position"; default: all.
        batch: Maximum number of runs per pass.

    Returns:
        The metric of each run, and the fraction that it restores, per position, head or module.

    Raises:
        ShapeError: If the inputs have different shapes.
    """
    _, clean_inputs = resolve_inputs(model, clean)
    model, corrupted_inputs = resolve_inputs(model, corrupted)
    clean, corrupted = clean_inputs.args, corrupted_inputs.args
    shapes = [[tuple(x.shape) for x in input_tensors(args)] for args in (clean, corrupted)]
    if shapes[0] != shapes[1]:
        raise ShapeError(
            f"the clean input is {shapes[0]} and the corrupted one {shapes[1]}; positions are patched separately, so "
            "pass two inputs of the same length"
        )
    require(
        positions is None or granularity == "position",
        f"positions was given with granularity={granularity!r}; expected granularity='position'",
    )
    source, logits = _record(model, clean, modules, granularity, "blocks")
    metric = _metric(metric, logits)
    sweep = _sweep(model, corrupted, source, granularity, metric, batch, lambda x: x, positions)
    return PatchingResult(
        method="patched",
        granularity=granularity,
        clean=_number(metric(logits)),
        tokens=corrupted_inputs.tokens,
        rows=sweep.rows,
        columns=sweep.columns,
        values=sweep.values,
        baseline=sweep.baseline,
    )


@explain_keywords
def ablate(
    model: nn.Module | Pipeline,
    args: ModelArgs | str,
    metric: Metric | None = None,
    *,
    modules: str | None = None,
    granularity: Granularity = "head",
    to: Literal["zero", "mean"] = "zero",
    batch: int | None = None,
) -> PatchingResult:
    """Ablate one head, module or position at a time, and measure each run.

        result = analysis.ablate(model, ids, analysis.LogitMetric(token=17))
        result.change                          # (layers, heads): change of the logit without each head
        analysis.ablate(model, ids, granularity="module", modules="blocks.*.feed_forward")

    Args:
        model: Model in evaluation mode, or a pipeline.
        args: Input tensor, tuple of arguments, or dict of keyword arguments; for a pipeline also a text.
        metric: Function from logits to a number; default: the logit of the model's top prediction.
        modules: Pattern; default: all heads, or the attention and feed-forward layers for another `granularity`.
        granularity: "head", "module" or "position".
        to: "zero", or "mean" for the mean over all positions (and sequences) of this run.
        batch: Maximum number of runs per pass.

    Returns:
        The metric of each run, and its change, per head, module or position.
    """
    model, inputs = resolve_inputs(model, args)
    args = inputs.args
    require(to in ("zero", "mean"), f"to is {to!r}; expected 'zero' or 'mean'")
    source, logits = _record(model, args, modules, granularity, "contributors")

    def ablated(x: Tensor) -> Tensor:
        return torch.zeros_like(x) if to == "zero" else x.mean(0 if x.dim() < 3 else (0, -2), keepdim=True).expand_as(x)

    sweep = _sweep(model, args, source, granularity, _metric(metric, logits), batch, ablated)
    return PatchingResult(
        method="ablated",
        granularity=granularity,
        tokens=inputs.tokens,
        rows=sweep.rows,
        columns=sweep.columns,
        values=sweep.values,
        baseline=sweep.baseline,
    )


def _record(
    model: nn.Module,
    args: ModelArgs,
    modules: str | None,
    granularity: Granularity,
    default: Literal["blocks", "contributors"],
) -> tuple[Trace, Tensor]:
    """Return a trace of the activations to change, and the logits."""
    require(
        granularity in ("position", "head", "module"),
        f"granularity is {granularity!r}; expected 'position', 'head' or 'module'",
    )
    paths = [modules] if modules else []
    if modules is None:
        with trace(model) as attention:
            stream = record_residual_stream(model, args)
        within = tuple(f"{block}." for block in stream.blocks)
        attention_layers = [path for path in attention.paths if f"{path}.".startswith(within)]
        paths = attention_layers if granularity == "head" else getattr(stream, default)
    require(
        bool(paths),
        f"no modules were found for granularity={granularity!r}; pass modules or another granularity",
    )
    with trace(model, *(f"{path}.{'weights' if granularity == 'head' else 'output'}" for path in paths)) as source:
        return source, run_logits(model, args)


def _metric(metric: Metric | None, logits: Tensor) -> Metric:
    if metric is None or isinstance(metric, LogitMetric):
        return (metric or LogitMetric()).resolve(logits)
    require(callable(metric), f"metric is {metric!r}; expected a function of the logits, such as LogitMetric(token=…)")
    return metric


@dataclass(frozen=True, kw_only=True, eq=False)
class PerRowEdit(Intervention):
    """Change each copy of the input in a batch differently: one index along `dim`, or all, of `value`."""

    copies: int
    changes: list[tuple[int, int]]  # (copy, index)
    value: Tensor
    dim: int | None

    def replacement(self, part: Tensor, path: str, positions: list[int]) -> Tensor:
        raise NotImplementedError  # replacements differ per copy

    def apply(self, x: Tensor, context: CallContext) -> Tensor:
        changed = x.clone().unflatten(0, (self.copies, -1))
        for copy, i in self.changes:
            if self.dim is None:
                changed[copy].copy_(self.value)
            else:
                changed[copy].select(self.dim, i).copy_(self.value.select(self.dim, i))
        return changed.flatten(0, 1)


class PatchingSweep(NamedTuple):
    """The metric of the unchanged run, and of every change: rows are modules, columns positions or heads."""

    rows: tuple[str, ...]
    columns: tuple[int, ...]
    values: Tensor
    baseline: float


def _sweep(
    model: nn.Module,
    args: ModelArgs,
    source: Trace,
    granularity: Granularity,
    metric: Metric,
    batch: int | None,
    change: Callable[[Tensor], Tensor],
    columns: Sequence[int] | None = None,
) -> PatchingSweep:
    """Return the metric of the unchanged run and of every change.

    `change` maps a recorded activation to its replacement. `columns` are the positions or heads to change, or None.
    """
    message = f"batch is {batch}; expected the maximum number of runs per pass, at least 1"
    require(batch is None or batch >= 1, message)
    heads = slice(None) if granularity == "head" else None
    dim = _DIMS.get(granularity)
    paths, read = (source.outputs, source.output) if heads is None else (source.paths, source.heads)
    baseline_logits = run_logits(model, args)
    counts = {path: _n_cells(path, read(path), dim) for path in paths}
    for i in columns or ():
        require(0 <= i < min(counts.values()), f"position is {i}; expected 0 to {min(counts.values()) - 1}")
    cells = [(path, i) for path in paths for i in (range(counts[path]) if columns is None else columns)]
    # Approximate memory of one run: its logits with workspace, and one active block.
    size = baseline_logits.element_size() * (4 * baseline_logits.numel() + 32 * read(paths[0]).numel())
    chunk_size = batch or max(1, _BUDGET // size)
    metrics: dict[str, list[float]] = {path: [] for path in paths}
    for start in range(0, len(cells), chunk_size):
        chunk = cells[start : start + chunk_size]
        with trace(model, "output") as t:
            for path in dict.fromkeys(path for path, _ in chunk):
                changes = [(copy, i) for copy, (cell_path, i) in enumerate(chunk) if cell_path == path]
                t.intervene(
                    path,
                    PerRowEdit(copies=len(chunk), changes=changes, value=change(read(path)), dim=dim, heads=heads),
                )
            logits = run_logits(model, repeat_batch(args, len(chunk)))
        for (path, _), rows in zip(chunk, logits.chunk(len(chunk)), strict=True):
            metrics[path].append(_number(metric(rows)))
    values = pad_ragged(metrics.values())
    baseline = _number(metric(baseline_logits))
    columns = range(values.shape[1]) if columns is None else columns
    return PatchingSweep(tuple(paths), tuple(columns), values, baseline)


def _n_cells(path: str, x: Tensor, dim: int | None) -> int:
    """Return the number of changes of a module's output."""
    if x.dim() < 3 and dim is not None:
        raise ShapeError(
            f"{path or 'the model'} returns {tuple(x.shape)}, which has no positions; use granularity='module'"
        )
    return 1 if dim is None else x.shape[dim]


def _number(value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ShapeError(
            f"the metric returned {tuple(value.shape)}; expected one number for the logits of one input, as from "
            "analysis.LogitMetric(token=…)"
        )
    return float(value)
