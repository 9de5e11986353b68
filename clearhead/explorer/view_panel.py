"""Views of one run: the attention report and the step-by-step drawing."""

from __future__ import annotations

import torch

from clearhead import analysis
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import did_you_mean, require
from clearhead.analysis.inputs.pipelines import shorten_text
from clearhead.analysis.reports import attention_layers, report_for_audio, report_for_ids, report_for_image
from clearhead.analysis.views.page import page_data
from clearhead.analysis.views.report import AttentionReport
from clearhead.analysis.walkthrough.walkthrough import walkthrough_of_ids
from clearhead.explorer.model_input import ModelRequest, decode_pixels, decode_samples, encode_input, with_answer
from clearhead.explorer.request import RequestContext, action
from clearhead.hub import Translation
from clearhead.models import CTCEncoder, VisionTransformer

_MAX_WALKTHROUGH_TOKENS = 256


def attention_report(request: ModelRequest, context: RequestContext) -> AttentionReport:
    """Return the attention report of an input."""
    pipeline = context.registry.model(request.model)
    if isinstance(pipeline.model, VisionTransformer):
        return report_for_image(pipeline, decode_pixels(request.pixels, pipeline.model), name="drawing")
    if isinstance(pipeline.model, CTCEncoder):
        return report_for_audio(pipeline, decode_samples(request.samples), name="recording")
    encoded = with_answer(encode_input(request, context))
    title = shorten_text(encoded.decode(encoded.source_ids or encoded.ids[: encoded.n_prompt]))
    if not encoded.source_ids:
        layers = attention_layers(pipeline.model)
        is_known = request.layer in ("", *layers)
        require(is_known, f"unknown layer {request.layer!r}; {did_you_mean(request.layer, layers)}")
        return report_for_ids(pipeline, encoded.input_ids, title=title, layer=request.layer or None)
    target_ids = encoded.ids[encoded.n_prompt :]
    if not encoded.is_finished:  # the token that the last row predicts
        target_ids = [*target_ids, int(encoded.logits(-1)[0].argmax())]
    translation = Translation(title, encoded.output_text, tuple(encoded.source_ids), tuple(target_ids))
    return analysis.translation_report(pipeline, translation)


@action(ModelRequest)
@torch.no_grad()
def attention(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the attention weights of every layer, as the data of a report page."""
    report = attention_report(request, context)
    context.checkpoint()
    is_long = len(report.default_map.rows) > _MAX_WALKTHROUGH_TOKENS

    def on_layer(i: int, n_layers: int) -> None:
        context.checkpoint(i, n_layers if is_long else 0, f"layer {i + 1} of {n_layers}")

    data = page_data(report, on_layer=on_layer)
    if isinstance(sound := data["sound"], dict):
        data["sound"] = {**sound, "wav": ""}  # the page has the recording, and a player
    return data


@action(ModelRequest)
@torch.no_grad()
def report_page(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the attention report as one self-contained HTML page."""
    return {"html": attention_report(request, context).html()}


@action(ModelRequest)
@torch.no_grad()
def walkthrough(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the forward pass step by step, and the drawing of the model."""
    return _walkthrough(request, context).to_dict()


@action(ModelRequest)
@torch.no_grad()
def walkthrough_page(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the walkthrough as one self-contained HTML page."""
    return {"html": _walkthrough(request, context).html()}


def _walkthrough(request: ModelRequest, context: RequestContext) -> analysis.Walkthrough:
    """Return the walkthrough of an input."""
    pipeline = context.registry.model(request.model)
    if isinstance(pipeline.model, VisionTransformer):
        return analysis.build_walkthrough(pipeline, decode_pixels(request.pixels, pipeline.model))
    encoded = with_answer(encode_input(request, context))
    length = max(len(encoded.input_ids), len(encoded.source_ids))
    require(
        length < _MAX_WALKTHROUGH_TOKENS,
        f"the input has {length} tokens but a step-by-step drawing takes fewer than {_MAX_WALKTHROUGH_TOKENS}; "
        "shorten it",
    )
    return walkthrough_of_ids(pipeline, encoded.ids, n_prompt=encoded.n_prompt, source_ids=encoded.source_ids)
