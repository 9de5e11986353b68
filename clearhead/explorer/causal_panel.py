"""The causal map: the effect of ablating each head, feed-forward network and block, one at a time.

The page requests a few layers at a time, so that a deep model fills the map step by step and every request is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead import analysis
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, did_you_mean, require
from clearhead.analysis.inputs.model_inputs import run_logits
from clearhead.analysis.inputs.pipelines import image_input
from clearhead.analysis.interp.metric import Metric
from clearhead.analysis.reports import attention_layers
from clearhead.explorer.model_input import ModelRequest, decode_pixels, encode_input, with_answer
from clearhead.explorer.request import RequestContext, action
from clearhead.hub import Pipeline
from clearhead.models import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class CausalMapRequest(ModelRequest):
    """An input, the output token whose logit is measured, and the layers to ablate.

    Attributes:
        step: Index of the generated token; by default the last one.
        layers: Paths of attention layers; by default all.
        to: Replacement of an ablated activation: zero, or its mean over the positions.
        measure: "logit" of the token, or "kl": the divergence of the prediction at its position.
    """

    step: NonNegativeInt | None = None
    layers: tuple[str, ...] = ()
    to: Literal["zero", "mean"] = "zero"
    measure: Literal["logit", "kl"] = "logit"


@dataclass(frozen=True)
class MeasuredCall:
    """One call of a model, and the output that is measured.

    Attributes:
        pipeline: The model.
        args: Arguments of the model.
        position: Position of the logits; −1 for a classifier.
        target: Token or class.
        target_name: Its display form.
    """

    pipeline: Pipeline
    args: tuple[Tensor, ...]
    position: int
    target: int
    target_name: str

    @property
    def metric(self) -> analysis.LogitMetric:
        """The logit of the target."""
        return analysis.LogitMetric(token=self.target, position=self.position)


def measured_call(request: ModelRequest, step: int | None, context: RequestContext) -> MeasuredCall:
    """Return the call of a request and the output token to measure: a generated one, or the top prediction."""
    pipeline = context.registry.model(request.model)
    if isinstance(pipeline.model, VisionTransformer):
        x = image_input(pipeline, decode_pixels(request.pixels, pipeline.model))
        target = int(run_logits(pipeline.model, x)[0].argmax())
        return MeasuredCall(pipeline, (x,), -1, target, str(target))
    encoded = with_answer(encode_input(request, context))
    n = len(encoded.generated_ids)
    require(step is None or step <= n, f"step is {step}; expected at most {n}")
    step = max(0, n - 1) if step is None else step
    position = encoded.n_prompt - 1 + step
    if step < n:
        target = encoded.generated_ids[step]
    else:
        target = int(run_logits(pipeline.model, encoded.inputs)[0, -1].argmax())
    return MeasuredCall(pipeline, encoded.inputs, position, target, pipeline.tokenizer.tokens([target])[0])


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """The changes of the measured output by ablating the parts of one attention layer and of its block.

    Attributes:
        path: Path of the attention layer.
        heads: Change by each head.
        layer: Change by the whole attention layer.
        feed_forward_path: Path of the feed-forward network that belongs to the layer; None if there is none.
        feed_forward: Change by the feed-forward network.
        skip: Change if the block is skipped; None for an attention layer that is not the first one of its block.
    """

    path: str
    heads: list[float]
    layer: float
    feed_forward_path: str | None
    feed_forward: float | None
    skip: float | None

    def to_dict(self) -> JSONObject:
        """Return plain data for JSON; parts that do not exist are left out."""
        row: JSONObject = {"path": self.path, "heads": self.heads, "layer": self.layer}
        if self.feed_forward_path is not None:
            row["feed_forward"] = {"path": self.feed_forward_path, "value": self.feed_forward}
        return row if self.skip is None else row | {"skip": self.skip}


@action(CausalMapRequest)
@torch.no_grad()
def causal_map(request: CausalMapRequest, context: RequestContext) -> JSONObject:
    """Return the change of the measured output by each ablation, layer by layer."""
    call = measured_call(request, request.step, context)
    rows, baseline = ablation_rows(request, call, context)
    position = {"target": call.target_name, "position": call.position}
    return {"rows": [row.to_dict() for row in rows], "baseline": baseline} | position


def ablation_rows(
    request: CausalMapRequest, call: MeasuredCall, context: RequestContext
) -> tuple[list[AblationRow], float]:
    """Return the row of each requested layer, and the measured output without ablation."""
    model = call.pipeline.model
    layers = attention_layers(model)
    for path in request.layers:
        require(path in layers, f"unknown attention layer {path!r}; {did_you_mean(path, layers)}")
    logits = run_logits(model, call.args)
    metric = call.metric if request.measure == "logit" else _divergence(logits, call.position)
    baseline = float(metric(logits))
    rows = []
    for i, path in enumerate(request.layers or layers):
        context.checkpoint(i, len(request.layers or layers), path)
        rows.append(_ablate_layer(request, call, metric, path, baseline))
    return rows, baseline


def _ablate_layer(
    request: CausalMapRequest, call: MeasuredCall, metric: Metric, path: str, baseline: float
) -> AblationRow:
    """Return the changes by each head and by the whole attention layer, and of the rest of its block."""
    model = call.pipeline.model

    def ablate(modules: str, granularity: Literal["head", "module"]) -> list[float]:
        result = analysis.ablate(model, call.args, metric, modules=modules, granularity=granularity, to=request.to)
        return _changes(result)

    block, _, name = path.rpartition(".")
    is_first = name == "attention"
    feed_forward = f"{block}.feed_forward" if is_first and _has_module(model, f"{block}.feed_forward") else None
    return AblationRow(
        path=path,
        heads=ablate(path, "head"),
        layer=ablate(path, "module")[0],
        feed_forward_path=feed_forward,
        feed_forward=None if feed_forward is None else ablate(feed_forward, "module")[0],
        skip=float(metric(_without_block(model, block, call.args))) - baseline if is_first else None,
    )


def _has_module(model: nn.Module, path: str) -> bool:
    """Return whether a model has a module of this path."""
    return path in dict(model.named_modules())


def _changes(result: analysis.PatchingResult) -> list[float]:
    """Return the changes of the metric of one module."""
    changes: list[float] = result.change[0].tolist()
    return changes


def _divergence(before: Tensor, position: int) -> Metric:
    """Return KL(before ‖ after) of the prediction at a position, as a metric."""
    select: Callable[[Tensor], Tensor] = lambda logits: logits[0] if logits.dim() < 3 else logits[0, position]  # noqa: E731
    p = select(before).double().log_softmax(-1)

    def metric(logits: Tensor) -> float:
        q = select(logits).double().log_softmax(-1)
        return float(torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum().clamp(min=0.0))

    return metric


def _without_block(model: nn.Module, block: str, args: tuple[Any, ...]) -> Tensor:
    """Return the logits of the model with a block whose output is its input."""
    inputs: list[Tensor] = []
    handle = model.get_submodule(block).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with analysis.trace(model, "output") as skipped:
            skipped.intervene(block, analysis.ReplaceActivation(lambda _: inputs[-1]))
            return run_logits(model, args)
    finally:
        handle.remove()
