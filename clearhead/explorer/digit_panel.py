"""The panel of digits: a drawing as the models of pictures read it, stroke by stroke, and what each looked at.

Where a model looked is the gradient of its answer: how much each pixel could still change it. Of one that attends there
is also the rollout of its attention, from the patches to what it reads off at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead import analysis
from clearhead._core.validation import require
from clearhead.analysis.measures import rollout
from clearhead.analysis.reports import image_input
from clearhead.config import Validated
from clearhead.explorer.actions import RequestContext
from clearhead.explorer.model_panel import pixels_of
from clearhead.models import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class Drawing(Validated):
    pixels: str


def digit(given: Drawing, context: RequestContext) -> dict[str, Any]:
    """Every model of pictures on this page: its chances, the pixels that count, and where it attended."""
    names = [name for name in context.registry.names if context.registry.model(name).task == "digits"]
    require(bool(names), "no model on this page reads pictures: start it with digits-vit and digits-conv")
    return {"models": [_read(name, given.pixels, context) for name in names]}


def _read(name: str, pixels: str, context: RequestContext) -> dict[str, Any]:
    context.checkpoint()
    trained = context.registry.model(name)
    model: Any = trained.model
    x = image_input(trained, pixels_of(pixels, model)).requires_grad_()
    with torch.enable_grad():
        logits = model(x)
        (slope,) = torch.autograd.grad(logits[0].max(), x)
    answer = {"name": name, "chances": logits[0].detach().softmax(-1).tolist(), "counts": _shares(slope[0, 0].abs())}
    return answer | {"kind": type(model).__name__, "attended": _attended(model, x.detach())}


@torch.no_grad()
def _attended(model: Any, x: Tensor) -> list[list[int]] | None:
    if not isinstance(model, VisionTransformer):
        return None
    with analysis.trace(model, "**.attention.weights") as seen:
        model(x)
    whole = rollout([seen.weights(path)[0] for path in seen.paths])  # (T, T)
    extra, (rows, columns) = model.config.pooling.n_extra, model.config.grid
    return _shares((whole[0] if extra else whole.mean(0))[extra:].view(rows, columns))


def _shares(values: Tensor) -> list[list[int]]:
    """From 0 to 255, the largest being 255."""
    return (255 * values / values.max().clamp(min=1e-12)).round().int().tolist()
