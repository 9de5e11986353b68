"""The panel of costs: sizes in, what they cost out; how that grows with the length, what limits it, what fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from clearhead._core.validation import Range, require
from clearhead.analysis.cost import Cost, Machine
from clearhead.analysis.cost import cost as predict
from clearhead.analysis.cost.fit import largest_fit
from clearhead.config import Config, Validated
from clearhead.explorer.actions import RequestContext
from clearhead.masks import parse
from clearhead.models import DecoderConfig, EncoderConfig
from clearhead.nn.positions import Rotary, Sinusoidal

_MACHINE = "h200"
_LENGTHS = 7


def _up_to(most: int) -> Any:
    return Annotated[int, Range(ge=1, le=most)]


@dataclass(frozen=True, kw_only=True)
class Sizes(Validated):
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
        require(
            self.d_model % self.n_heads == 0,
            f"d_model is {self.d_model} and n_heads {self.n_heads}; choose heads that divide the width",
        )

    @property
    def config(self) -> Config:
        even = self.d_model % 2 == 0 and (self.d_model // self.n_heads) % 2 == 0
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in ("d_model", "n_heads", "n_kv_heads", "n_layers", "d_ff", "vocab_size")
        }
        fields |= {"max_len": self.tokens, "positions": Rotary() if even else Sinusoidal()}
        return DecoderConfig(**fields) if self.kind == "decoder" else EncoderConfig(**fields)

    @property
    def how(self) -> dict[str, Any]:
        mask = parse(self.mask) if self.mask.strip() else None
        return {"dtype": getattr(torch, self.dtype), "training": self.training, "mask": mask}


def _priced(sizes: Sizes, tokens: int) -> Cost:
    return predict(sizes.config, tokens=tokens, batch=sizes.batch, **sizes.how)


def cost(sizes: Sizes, context: RequestContext) -> dict[str, Any]:
    """The table of parts, the memory, the time on a GPU and what it is spent on."""
    found = _priced(sizes, sizes.tokens)
    context.checkpoint()
    machine = Machine.read(_MACHINE)
    time, ceilings = found.time(machine), found.ceilings(machine)
    document = found.to_dict(formulas=False)
    spent = {name: getattr(time, name) for name in ("arithmetic", "memory_traffic", "kernel_launches", "host_wait")}
    return document | {
        "time": {"seconds": time.seconds, "bottleneck": time.bottleneck, "spent": spent, "on": machine.name},
        "ceilings": {name: {"seconds": seconds, "by": by} for name, (seconds, by) in ceilings.items()},
        "fits": document["memory"]["peak"] <= sizes.memory * (1 << 30),
    }


def growth(sizes: Sizes, context: RequestContext) -> dict[str, Any]:
    """Operations, memory and time at a few lengths around the chosen one, each twice the one before."""
    machine = Machine.read(_MACHINE)
    lengths = sorted({max(1, sizes.tokens << i >> 3) for i in range(_LENGTHS)})
    rows = []
    for i, tokens in enumerate(lengths):
        context.checkpoint(i, len(lengths), f"{tokens:,} tokens")
        found = _priced(sizes, tokens)
        row = {"tokens": tokens, "flops": found.flops.value, "peak": found.memory.peak.value}
        rows.append(row | {"seconds": found.time(machine).seconds})
    return {"rows": rows}


def fits(sizes: Sizes, context: RequestContext) -> dict[str, Any]:
    """The largest batch at this length and the greatest length at this batch that stay inside a memory."""
    config = sizes.config.replace(max_len=1 << 20)
    context.checkpoint(0, 1, "searching")
    found = largest_fit(config, int(sizes.memory * (1 << 30)), tokens=sizes.tokens, batch=sizes.batch, **sizes.how)
    return {"batch": found.max_batch, "tokens": found.max_tokens, "at_end": found.is_model_limit}
