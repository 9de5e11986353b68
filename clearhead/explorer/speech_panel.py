"""The speech panel: the digits of a recording, recognized as `clearhead listen` does."""

from __future__ import annotations

import math

import torch

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import require
from clearhead.explorer.model_input import ModelRequest, decode_samples
from clearhead.explorer.request import RequestContext, action
from clearhead.models import CTCEncoder

_N_BARS = 200  # of the drawing of the sound


@action(ModelRequest)
@torch.no_grad()
def listen(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the recognized symbols with their times, and the envelope of the sound."""
    pipeline = context.registry.model(request.model)
    is_speech = isinstance(pipeline.model, CTCEncoder)
    require(is_speech, f"{request.model} does not recognize speech; choose spoken-digits")
    samples = decode_samples(request.samples)
    recognizer = pipeline.listen()
    symbols = [*recognizer.push(samples), *recognizer.flush()]
    bars = torch.nn.functional.adaptive_max_pool1d(samples.abs()[None], min(_N_BARS, len(samples)))[0]
    return {
        "seconds": len(samples) / recognizer.sample_rate,
        "envelope": [round(x, 4) for x in bars.tolist()],
        "symbols": [
            {"text": s.text, "start": s.start, "end": s.end, "probability": math.exp(s.log_prob)} for s in symbols
        ],
    }
