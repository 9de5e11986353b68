"""The cost panel: predicted cost of a model from its sizes, its growth with the length, and what fits in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import Range, require
from clearhead.analysis.cost import Cost, Machine
from clearhead.analysis.cost import cost as predict_cost
from clearhead.analysis.cost.fit import largest_fit
from clearhead.config import Config, Validated
from clearhead.explorer.request import RequestContext, action, field_errors
from clearhead.masks import Mask, parse
from clearhead.models import DecoderConfig, EncoderConfig
from clearhead.nn.positions import Rotary, Sinusoidal

_MACHINE = "h200"
_N_LENGTHS = 7
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class CostRequest(Validated):
    """Sizes of a model and of its input."""

    kind: Literal["decoder", "encoder"] = "decoder"
    d_model: Annotated[int, Range(ge=1, le=16384)] = 768
    n_heads: Annotated[int, Range(ge=1, le=256)] = 12
    n_kv_heads: Annotated[int, Range(ge=1, le=256)] | None = None
    n_layers: Annotated[int, Range(ge=1, le=128)] = 12
    d_ff: Annotated[int, Range(ge=1, le=65536)] | None = None
    vocab_size: Annotated[int, Range(ge=1, le=1 << 20)] = 50257
    tokens: Annotated[int, Range(ge=1, le=1 << 20)] = 1024
    batch: Annotated[int, Range(ge=1, le=1 << 14)] = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    training: bool = False
    mask: str = ""
    memory: Annotated[float, Range(gt=0, le=4096)] = 80.0  # GiB

    def validate(self) -> None:
        """Check that the heads divide the width."""
        require(
            self.d_model % self.n_heads == 0,
            f"d_model is {self.d_model} and n_heads is {self.n_heads}; choose n_heads that divide d_model",
        )

    @property
    def config(self) -> Config:
        """The configuration of the model."""
        fits_rotary = self.d_model % 2 == 0 and (self.d_model // self.n_heads) % 2 == 0
        make = DecoderConfig if self.kind == "decoder" else EncoderConfig
        return make(
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            n_layers=self.n_layers,
            d_ff=self.d_ff,
            vocab_size=self.vocab_size,
            max_len=self.tokens,
            positions=Rotary() if fits_rotary else Sinusoidal(),
        )

    @property
    def parsed_mask(self) -> Mask | None:
        """The mask, or None for the model's own."""
        with field_errors("mask"):
            return parse(self.mask) if self.mask.strip() else None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def _predict(request: CostRequest, tokens: int) -> Cost:
    """Return the predicted cost at a length."""
    return predict_cost(
        request.config,
        tokens=tokens,
        batch=request.batch,
        dtype=request.torch_dtype,
        training=request.training,
        mask=request.parsed_mask,
    )


@action(CostRequest)
def cost(request: CostRequest, context: RequestContext) -> JSONObject:
    """Return the cost of every part, memory, and the time on a GPU with its breakdown."""
    prediction = _predict(request, request.tokens)
    context.checkpoint()
    machine = Machine.read(_MACHINE)
    time = prediction.time(machine)
    document = prediction.to_dict(formulas=False)
    components = ("arithmetic", "memory_traffic", "kernel_launches", "host_wait")
    return document | {
        "time": {
            "seconds": time.seconds,
            "bottleneck": time.bottleneck,
            "breakdown": {name: getattr(time, name) for name in components},
            "machine": machine.name,
        },
        "ceilings": {
            name: {"seconds": seconds, "bound": bound}
            for name, (seconds, bound) in prediction.ceilings(machine).items()
        },
        "fits": prediction.memory.peak.value <= request.memory * _GIB,
    }


@action(CostRequest)
def cost_growth(request: CostRequest, context: RequestContext) -> JSONObject:
    """Return FLOPs, memory and time at lengths around the chosen one, which double from row to row."""
    machine = Machine.read(_MACHINE)
    lengths = sorted({max(1, request.tokens << i >> 3) for i in range(_N_LENGTHS)})
    rows = []
    for i, tokens in enumerate(lengths):
        context.checkpoint(i, len(lengths), f"{tokens:,} tokens")
        prediction = _predict(request, tokens)
        rows.append(
            {
                "tokens": tokens,
                "flops": prediction.flops.value,
                "peak_memory": prediction.memory.peak.value,
                "seconds": prediction.time(machine).seconds,
            }
        )
    return {"rows": rows}


@action(CostRequest)
def largest_batch(request: CostRequest, context: RequestContext) -> JSONObject:
    """Return the largest batch at this length, and the greatest length at this batch, that fit in the memory."""
    config = request.config.replace(max_len=1 << 20)
    context.checkpoint(0, 1, "searching")
    memory = int(request.memory * _GIB)
    limit = largest_fit(
        config,
        memory,
        tokens=request.tokens,
        batch=request.batch,
        dtype=request.torch_dtype,
        training=request.training,
        mask=request.parsed_mask,
    )
    return {"batch": limit.max_batch, "tokens": limit.max_tokens, "is_search_limit": limit.is_model_limit}
