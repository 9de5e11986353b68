"""The digit panel: predictions of the image models for a drawing, with two explanations.

The pixel attribution is the gradient of the largest logit. For a vision Transformer there is also attention rollout,
from the output to the patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead import analysis
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import require
from clearhead.analysis.inputs.pipelines import image_input
from clearhead.analysis.measures import rollout
from clearhead.config import Validated
from clearhead.explorer.model_input import decode_pixels
from clearhead.explorer.request import RequestContext, action
from clearhead.models import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class DigitRequest(Validated):
    """A drawing."""

    pixels: str  # grey bytes, in base64


@action(DigitRequest)
def classify_digit(request: DigitRequest, context: RequestContext) -> JSONObject:
    """Return probabilities, pixel attribution and attention of every image model on this page."""
    names = [name for name in context.registry.names if context.registry.model(name).task == "digits"]
    require(bool(names), "this page has no image model; start it with digits-vit and digits-conv")
    return {"models": [_classify(name, request.pixels, context) for name in names]}


def _classify(name: str, pixels: str, context: RequestContext) -> JSONObject:
    """Return the result of one model."""
    context.checkpoint()
    pipeline = context.registry.model(name)
    model = pipeline.model
    x = image_input(pipeline, decode_pixels(pixels, model)).requires_grad_()
    with torch.enable_grad():
        logits = model(x)
        (gradient,) = torch.autograd.grad(logits[0].max(), x)
    return {
        "name": name,
        "architecture": type(model).__name__,
        "probabilities": logits[0].detach().softmax(-1).tolist(),
        "pixel_attribution": _to_bytes(gradient[0, 0].abs()),
        "attention": _attention_rollout(model, x.detach()),
    }


@torch.no_grad()
def _attention_rollout(model: nn.Module, x: Tensor) -> list[list[int]] | None:
    """Return the attention rollout on the grid of patches; None for a model without attention."""
    if not isinstance(model, VisionTransformer):
        return None
    with analysis.trace(model, "**.attention.weights") as trace:
        model(x)
    weights = rollout([trace.weights(path)[0] for path in trace.paths])  # (T, T)
    n_extra = model.config.pooling.n_extra  # class tokens before the patches
    patches = (weights[0] if n_extra else weights.mean(0))[n_extra:]
    return _to_bytes(patches.view(*model.config.grid))


def _to_bytes(values: Tensor) -> list[list[int]]:
    """Scale values to 0 … 255, so that the largest is 255."""
    return (255 * values / values.max().clamp(min=1e-12)).round().int().tolist()
