"""The cost panel: predicted cost of a model from its sizes, its growth with the length, and what fits in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from clearhead._core.validation import Range, require
from clearhead.analysis.cost import Cost, Machine
from clearhead.analysis.cost import cost as predict_cost
from clearhead.analysis.cost.fit import largest_fit
from clearhead.config import Config, Validated
from clearhead.explorer.request import RequestContext
from clearhead.masks import parse
from clearhead.models import DecoderConfig, EncoderConfig
from clearhead.nn.positions import Rotary, Sinusoidal

_MACHINE = "h200"
_N_LENGTHS = 7
_GIB = 1 << 30


def _up_to(maximum: int) -> Any:
    """Return the type of an integer from 1 to `maximum`."""
    return Annotated[int, Range(ge=1, le=maximum)]


@dataclass(frozen=True, kw_only=True)
class CostRequest(Validated):
    """Sizes of a model and of its input."""

    kind: Literal["decoder", "encoder"] = "decoder"
    d_model: _up_to(16384) = 768  # type: ignore[valid-type]
    n_heads: _up_to(256) = 12  # type: ignore[valid-type]
    n_kv_heads: _up_to(256) | None = None  # type: ignore[valid-type]
    n_layers: _up_to(128) = 12  # type: ignore[valid-type]
    d_ff: _up_to(65536) | None = None  # type: ignore[valid-type]
    vocab_size: _up_to(1 << 20) = 50257  # type: ignore[valid-type]
    tokens: _up_to(1 << 20) = 1024  # type: ignore[valid-type]
    batch: _up_to(1 << 14) = 1  # type: ignore[valid-type]
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
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in ("d_model", "n_heads", "n_kv_heads", "n_layers", "d_ff", "vocab_size")
        }
        fields |= {"max_len": self.tokens, "positions": Rotary() if fits_rotary else Sinusoidal()}
        return DecoderConfig(**fields) if self.kind == "decoder" else EncoderConfig(**fields)

    @property
    def cost_options(self) -> dict[str, Any]:
        """Further arguments of `analysis.cost`."""
        mask = parse(self.mask) if self.mask.strip() else None
        return {"dtype": getattr(torch, self.dtype), "training": self.training, "mask": mask}


def _predict(request: CostRequest, tokens: int) -> Cost:
    """Return the predicted cost at a length."""
    return predict_cost(request.config, tokens=tokens, batch=request.batch, **request.cost_options)


def cost(request: CostRequest, context: RequestContext) -> dict[str, Any]:
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
        "fits": document["memory"]["peak"] <= request.memory * _GIB,
    }


def cost_growth(request: CostRequest, context: RequestContext) -> dict[str, Any]:
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


def largest_batch(request: CostRequest, context: RequestContext) -> dict[str, Any]:
    """Return the largest batch at this length, and the greatest length at this batch, that fit in the memory."""
    config = request.config.replace(max_len=1 << 20)
    context.checkpoint(0, 1, "searching")
    memory = int(request.memory * _GIB)
    limit = largest_fit(config, memory, tokens=request.tokens, batch=request.batch, **request.cost_options)
    return {"batch": limit.max_batch, "tokens": limit.max_tokens, "is_search_limit": limit.is_model_limit}
