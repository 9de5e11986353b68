"""The training panel: the log of a run, and what the model of each of its checkpoints computes for one input.

A run may still be training: its log and its list of checkpoints are read again at every request."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, cross_entropy

from clearhead import analysis, hub
from clearhead._core.json_types import JSONObject
from clearhead.analysis.reports import attention_layers
from clearhead.errors import ConfigError
from clearhead.explorer.comparison_panel import attention_axes
from clearhead.explorer.interpret_panel import ModelNameRequest, lens_view
from clearhead.explorer.model_input import EncodedInput, encode_input
from clearhead.explorer.request import RequestContext, action
from clearhead.explorer.run_panel import RunRequest, generate_ids
from clearhead.models import Decoder, EncoderDecoder
from clearhead.training.callbacks import read_log
from clearhead.training.recipe import Recipe

_MAX_POINTS = 400  # of a loss curve
_MAX_CELLS = 32  # per side of a map


@action(ModelNameRequest)
def training_log(request: ModelNameRequest, context: RequestContext) -> JSONObject:
    """Return the steps of the checkpoints of a run, and its losses."""
    registry = context.registry
    registry.model(request.model)
    folder = registry.run_folder(request.model)
    if folder is None:
        raise ConfigError(f"{request.model} has no checkpoints; start the explorer with the folder of a training run")
    rows = read_log(folder)
    recipe = Recipe.load(folder)
    curves = {
        kind: [(int(row["step"]), float(row["loss"])) for row in rows if row.get("kind") == kind and "loss" in row]
        for kind in ("train", "valid")
    }
    return {
        "steps": registry.checkpoint_steps(request.model),
        "train": _thinned(curves["train"]),
        "valid": _thinned(curves["valid"]),
        "is_finished": hub.bundled.unfinished_run(folder) is None,
        "n_kept": recipe.train.keep,
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most `_MAX_POINTS` points at equal distances, always with the last one."""
    stride = -(-len(points) // _MAX_POINTS) or 1
    return [*points[:-1][::stride], *points[-1:]]


@action(RunRequest)
@torch.no_grad()
def training_frame(request: RunRequest, context: RequestContext) -> JSONObject:
    """Return the weights of all heads, the logit lens, the loss of the input, and what the checkpoint writes."""
    encoded = encode_input(request, context)
    model = encoded.pipeline.model
    layers = attention_layers(model)
    if not isinstance(model, (Decoder, EncoderDecoder)) or not layers:
        raise ConfigError(f"{request.model} does not generate text with attention; choose another run")
    with analysis.trace(model, *(f"{path}.weights" for path in layers)) as t:
        model(*encoded.inputs)
    context.checkpoint()
    maps = []
    for path in layers:
        rows, columns = attention_axes(encoded, path)
        weights = t.weights(path)[0].float().cpu()
        size = [min(n, _MAX_CELLS) for n in weights.shape[1:]]
        pooled = adaptive_max_pool2d(weights, size) if size != list(weights.shape[1:]) else weights
        maps.append({"path": path, "rows": asdict(rows), "columns": asdict(columns), "size": size, **_codes(pooled)})
    context.checkpoint()
    lens = asdict(lens_view(encoded))
    return {"maps": maps, "lens": lens, "loss": _loss(encoded), "writes": _written_text(request, encoded, context)}


def _codes(weights: Tensor) -> JSONObject:
    """Return weights (H, T, S) as bytes in base64: the square roots, which resolve small weights better."""
    codes = (255 * weights.clamp(0, 1).sqrt()).round().to(torch.uint8)
    return {"n_heads": len(weights), "codes": base64.b64encode(codes.numpy().tobytes()).decode()}


def _loss(encoded: EncodedInput) -> float | None:
    """Return the mean loss, in nats, of the generated ids, or of all ids if none were generated."""
    first = encoded.n_prompt if encoded.generated_ids else 1
    targets = torch.tensor(encoded.ids[first:])
    if not len(targets):
        return None
    return float(cross_entropy(encoded.logits(first - 1)[: len(targets)].double(), targets))


def _written_text(request: RunRequest, encoded: EncodedInput, context: RequestContext) -> str:
    """Return what the checkpoint itself writes after the prompt."""
    prompt = EncodedInput(encoded.pipeline, encoded.source_ids, encoded.ids[: encoded.n_prompt], encoded.n_prompt)
    new_ids, _ = generate_ids(prompt, request, context)
    return EncodedInput(prompt.pipeline, prompt.source_ids, [*prompt.ids, *new_ids], prompt.n_prompt).output_text
