"""Direct logit attribution: the contribution of each head and feed-forward layer to a logit.

A logit is a sum over everything that was added to the residual stream, if the scale of each norm is fixed to its value
in the run (see `residual_stream`). Together with embeddings, positions and biases, the parts add up to the logit except
for rounding.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from clearhead._core.json_types import JSONObject
from clearhead._core.keywords import explain_keywords
from clearhead.analysis.inputs.model_inputs import ModelArgs, input_tensors
from clearhead.analysis.inputs.pipelines import resolve_inputs
from clearhead.analysis.interp.metric import LogitMetric
from clearhead.analysis.interp.residual_stream import ResidualStream, Term, record_residual_stream
from clearhead.analysis.tracing.trace import Trace, trace
from clearhead.analysis.views.chart import Chart, HasCharts, bar_chart, head_chart, pad_ragged
from clearhead.errors import ConfigError, ShapeError
from clearhead.hub import Pipeline

Kind = Literal["embedding", "head", "attention", "feed-forward", "layer", "bias"]


@dataclass(frozen=True)
class LogitContribution:
    """Contribution of one component to the logit.

    Args:
        kind: Kind of the component, such as a head or a feed-forward network.
        path: Its module or parameter.
        value: The contribution.
        layer: Index of its block, if it is part of one.
        head: Index of the head, if it is one.
    """

    kind: Kind
    path: str
    value: float
    layer: int | None = None
    head: int | None = None

    @property
    def name(self) -> str:
        """Short name: block index and module, or the path of a component outside of the blocks."""
        if self.head is not None:
            return f"{self.layer}.{self.head} {self.path.rpartition('.')[2]}"
        if self.layer is None:
            return self.path
        return f"{self.layer} {re.sub(r'^.*?[.]' + str(self.layer) + '[.]', '', self.path)}"


@dataclass(frozen=True, kw_only=True)
class Attribution(HasCharts):
    """All parts of one logit in the order of computation; `total` of them and `residual` add up to the logit.

    Args:
        metric: The explained logit, or difference of logits.
        logit: Its value.
        parts: Contributions in the order of computation.
        tolerance: Bound of `residual` that follows from rounding.
    """

    metric: LogitMetric
    logit: float
    parts: tuple[LogitContribution, ...]
    tolerance: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return math.fsum(part.value for part in self.parts)

    @property
    def residual(self) -> float:
        """Difference between the logit and the sum of the parts: rounding."""
        return self.logit - self.total

    @property
    def largest(self) -> list[LogitContribution]:
        """The parts in descending order of absolute value."""
        return sorted(self.parts, key=lambda part: -abs(part.value))

    def heads(self) -> tuple[tuple[str, ...], Tensor]:
        """Return the attention layers, and the contribution of each head, (layers, heads); NaN if a layer has fewer."""
        of_heads = [part for part in self.parts if part.head is not None]
        if not of_heads:
            raise ConfigError("the heads of this model could not be separated; `parts` contains its layers as a whole")
        paths = tuple(dict.fromkeys(part.path for part in of_heads))
        return paths, pad_ragged([part.value for part in of_heads if part.path == path] for path in paths)

    def charts(self, *, most: int = 24) -> list[Chart]:
        """Return charts of the largest parts and of all heads."""
        parts = [(part.name, part.value) for part in self.largest[:most]]
        remaining = math.fsum(part.value for part in self.largest[most:]) + self.residual
        note = f"The parts add up to the logit {self.logit:.4g}, except for a rounding error of {self.residual:.1g}."
        charts = [bar_chart("Largest contributions to the logit", [*parts, ("all others", remaining)], note)]
        if any(part.head is not None for part in self.parts):
            paths, values = self.heads()
            charts.append(head_chart("Contribution of each head", paths, values, signed=True))
        return charts

    def to_dict(self) -> JSONObject:
        """Return the document that `--view attribution --json` prints."""
        metric = {"token": self.metric.token, "baseline": self.metric.baseline, "position": self.metric.position}
        parts = [{"name": part.name, **vars(part)} for part in self.parts]
        return {"metric": metric, "logit": self.logit, "total": self.total, "residual": self.residual, "parts": parts}


@explain_keywords
def attribute(model: nn.Module | Pipeline, args: ModelArgs | str, metric: LogitMetric | None = None) -> Attribution:
    """Attribute one logit (or the difference of two) to the parts of a model, from one run over one sequence.

        attribution = analysis.attribute(model, ids, analysis.LogitMetric(token=17, baseline=4))
        attribution.largest[0]                 # LogitContribution(kind="head", path="blocks.3.attention", head=5, …)
        attribution.total + attribution.residual   # the logit itself

    Norms are linear if their scale is fixed to its value in the run; their biases are separate parts, like embeddings,
    positions and the biases of output projections. Heads are separated if the input of the layer's output projection is
    the concatenation of the head outputs.

    Args:
        model: Model in evaluation mode, or a pipeline.
        args: Input tensor, tuple of arguments, or dict of keyword arguments, with a batch of 1; for a pipeline also a
            text.
        metric: The logit to attribute; default: the model's top prediction.

    Returns:
        The contribution of each part to the logit, and a residual within rounding error.

    Raises:
        ShapeError: If the batch is not 1.
        ConfigError: If the model is not linear between its blocks and its logits.
    """
    model, inputs = resolve_inputs(model, args)
    args = inputs.args
    metric = LogitMetric() if metric is None else metric
    batch = {x.shape[0] for x in input_tensors(args) if x.dim()}
    if batch != {1}:
        raise ShapeError(f"cannot attribute a batch of {max(batch, default=0)}; pass one sequence, such as ids[:1]")
    with torch.inference_mode(False), trace(model) as attention:
        stream = record_residual_stream(model, args)
    metric = metric.resolve(stream.logits)
    with torch.inference_mode(False), torch.enable_grad():
        logits = stream.logits.detach().requires_grad_()
        target = metric.as_tensor(logits)
        (gradient,) = torch.autograd.grad(target, logits)
        terms = stream.terms(gradient)
        logit = float(target.detach())
    parts = sorted((part for term in reversed(terms) for part in _parts(term, stream, attention)), key=_sort_key)
    # The error of a sum of n terms is about √n roundings of its size; the terms are products of features.
    n_terms = len(terms) + stream.logits.shape[-1] + max(term.value.shape[-1] for term in terms if term.value.dim())
    size = math.fsum(float(term.shares.abs().sum()) for term in terms)
    tolerance = math.sqrt(n_terms) * stream.rounding * max(size, abs(logit))
    attribution = Attribution(metric=metric, logit=logit, parts=tuple(parts), tolerance=tolerance)
    if not abs(attribution.residual) <= tolerance or all(part.layer is None for part in parts):
        last = next((term.step.name for term in terms if term.step is not None), "nothing")
        raise ConfigError(
            "cannot attribute this logit because the model is not linear between its blocks and its logits (the last "
            f"operation is {last}); use the logit lens or patching"
        )
    return attribution


def _parts(term: Term, stream: ResidualStream, attention: Trace) -> list[LogitContribution]:
    """Split a term into the heads and the bias of an attention layer, or return it as one part."""
    layer = next((i for i, block in enumerate(stream.blocks) if term.path.startswith(f"{block}.")), None)
    value = float(term.shares.sum())
    if term.step is None and term.value.dim() < 2:
        return [LogitContribution("bias", term.path, value, layer)]
    if term.step is None or layer is None:
        return [LogitContribution("embedding", term.path, value, layer)]
    paths = [path for path in attention.paths if f"{path}.".startswith(f"{term.path}.")]
    if not paths:  # a layer without attention that was recorded
        return [LogitContribution("feed-forward" if attention.paths else "layer", term.path, value, layer)]
    shares = _by_head(term, attention.heads(paths[0])) if len(paths) == 1 else None
    if shares is None:
        return [LogitContribution("attention", term.path, value, layer)]
    heads = [LogitContribution("head", term.path, share, layer, head) for head, share in enumerate(shares)]
    bias = LogitContribution("bias", f"{term.path} (output bias)", value - math.fsum(shares), layer)
    return heads if term.step.product[2] is None else [*heads, bias]


def _sort_key(part: LogitContribution) -> float:
    """Order parts by layer: embeddings first, additions to the whole stream such as the final norm's bias last."""
    if part.layer is not None:
        return part.layer
    return -1 if part.kind == "embedding" else math.inf


def _by_head(term: Term, heads: Tensor) -> list[float] | None:
    """Return the contribution of each head through the output projection; None if its input is not the heads."""
    step = term.step
    if step is None or step.name not in ("linear", "addmm"):
        return None
    x, matrix, _ = step.product
    H, joined = heads.shape[-3], heads.transpose(-2, -3).flatten(-2)  # (B, T, H·E)
    if x.numel() != joined.numel() or not torch.equal(x.reshape(joined.shape), joined):
        return None
    input_gradient = term.gradient.double() @ matrix.detach().double().mT  # at the input of the projection
    return (input_gradient * x.double()).flatten(0, -2).sum(0).unflatten(0, (H, -1)).sum(-1).tolist()
