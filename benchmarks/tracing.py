"""Overhead of tracing a long forward pass, and cost of attention weights: `python -m benchmarks tracing`.

One forward pass of a decoder is timed with and without a trace of one attention layer, alternately; starting and ending
the trace is included. Then the attention weights of a few rows of one head are recomputed, and those of the whole head
in blocks. On a GPU the model has the sizes of GPT-2 and encodes 16,384 tokens in bfloat16; on a CPU a small model is
used, to try the command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Row, compare, gather
from clearhead import analysis
from clearhead.analysis.cost.timing import peak_of, seconds
from clearhead.masks import Mask, causal, every, window
from clearhead.models import DecoderConfig
from clearhead.nn.positions import Rotary

TARGET = 1.10
"""Largest acceptable ratio of the times of a forward pass with and without a trace of one layer."""
MASKS: tuple[Mask, ...] = (causal(), causal() & (window(256, 0) | every(64)))


@dataclass(frozen=True)
class TracingOverhead(Row):
    """Overhead under one mask. Times in ms, memory in bytes; memory is None on a CPU."""

    mask: str
    length: int
    layers: int
    dtype: str
    untraced_ms: float
    traced_ms: float
    ratio: float
    target: float
    trace_bytes: int  # tensors referenced by the trace: q, k, v and the output of the layer
    extra_peak_bytes: int | None  # peak memory with the trace minus without it
    rows: int
    rows_ms: float  # attention weights of `rows` rows of one head
    rows_peak_bytes: int | None
    head_ms: float  # all attention weights of one head, in blocks
    head_peak_bytes: int | None
    full_weights_bytes: int  # size of the T × T weights of one head in float32
    difference: float  # between the output recomputed from those rows and the output of the forward pass
    tolerance: float

    @property
    def meets_target(self) -> bool:
        """Whether time, memory and difference are within their bounds."""
        peak = self.rows_peak_bytes or 0
        return self.ratio <= self.target and peak < self.full_weights_bytes and self.difference <= self.tolerance


@dataclass(frozen=True)
class Options:
    """Sizes of the traced model, and the number of repetitions."""

    length: int = 16384
    layers: int = 12
    width: int = 768
    heads: int = 12
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    rows: int = 64
    repeats: int = 20

    @property
    def layer(self) -> str:
        """Path of the traced attention layer, in the middle of the model."""
        return f"blocks.{self.layers // 2}.attention"


def options_for(device: str) -> Options:
    """Return the sizes of GPT-2 and 16,384 tokens for a GPU, and sizes that take seconds for a CPU."""
    if device != "cpu":
        return Options(device=device)
    return Options(length=1024, layers=4, width=64, heads=4, device=device, dtype=torch.float32, repeats=4)


def measure(
    options: Options, out: Path | None = None, on_row: Callable[[TracingOverhead], None] = lambda row: None
) -> list[TracingOverhead]:
    """Return one row per mask; write each to `out` as it is measured."""
    return gather((_row(mask, options) for mask in MASKS), out, on_row)


@torch.no_grad()
def _row(mask: Mask, options: Options) -> TracingOverhead:
    """Measure the overhead under one mask."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": options.width, "n_heads": options.heads, "n_layers": options.layers}
    vocab_size = 256  # small, so that the time is that of the blocks and not of the logits
    config = DecoderConfig(vocab_size=vocab_size, max_len=options.length, **sizes, positions=Rotary(), mask=mask)
    model = config.build().to(device=options.device, dtype=options.dtype).eval()
    ids = torch.randint(vocab_size, (1, options.length), device=options.device)
    head, rows = options.heads // 2, range(options.length // 2, options.length // 2 + options.rows)

    def traced() -> analysis.Trace:
        with analysis.trace(model, f"{options.layer}.weights") as t:
            model(ids)
        return t

    def sum_weights() -> None:
        """Sum the weights per key, which needs every weight of the head but stores none."""
        total = torch.zeros(options.length, device=options.device)
        for _, block in t.weight_blocks(options.layer, head):
            total += block.sum((0, 1))

    untraced = partial(model, ids)
    name = f"forward with a trace of {options.layer} / without"
    times = compare(name, traced, untraced, target=TARGET, repeats=options.repeats)
    peak, with_trace = _peak(untraced, options), _peak(traced, options)
    t = traced()
    rows_ms, rows_peak = _cost(lambda: t.weights(options.layer, heads=head, rows=rows), options)
    head_ms, head_peak = _cost(sum_weights, options)
    model_fields: dict[str, Any] = {"mask": str(mask), "length": options.length, "layers": options.layers}
    times_fields: dict[str, Any] = {"untraced_ms": times.baseline_ms, "traced_ms": times.value_ms, "ratio": times.ratio}
    return TracingOverhead(
        **model_fields,
        dtype=str(options.dtype).removeprefix("torch."),
        **times_fields,
        target=times.target,
        trace_bytes=4 * ids.numel() * options.width * options.dtype.itemsize,
        extra_peak_bytes=None if peak is None or with_trace is None else max(0, with_trace - peak),
        rows=options.rows,
        rows_ms=rows_ms,
        rows_peak_bytes=rows_peak,
        head_ms=head_ms,
        head_peak_bytes=head_peak,
        full_weights_bytes=4 * options.length**2,
        difference=t.difference(options.layer, heads=head, rows=rows),
        tolerance=t.tolerance(options.layer, heads=head, rows=rows),
    )


def _cost(call: Callable[[], object], options: Options) -> tuple[float, int | None]:
    """Return the milliseconds of the second call, and its peak memory."""
    seconds(call)
    return 1e3 * seconds(call), _peak(call, options)


def _peak(call: Callable[[], object], options: Options) -> int | None:
    """Return the peak of the memory that a call allocates, or None on a CPU."""
    if options.device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    return peak_of(call) - before


def line(row: TracingOverhead) -> str:
    """Format a row for the terminal."""
    memory = ""
    if row.rows_peak_bytes is not None:
        extra, rows, full = (
            f"{n / 1e6:.0f} MB" for n in (row.extra_peak_bytes or 0, row.rows_peak_bytes, row.full_weights_bytes)
        )
        memory = f" | peak + {extra} | rows + {rows} of {full}"
    return (
        f"{row.mask}, {row.length:,} tokens: forward {row.untraced_ms:.1f} ms, traced {row.traced_ms:.1f} ms "
        f"({row.ratio:.3f}, target ≤ {row.target:g}) | {row.rows} rows of a head {row.rows_ms:.2f} ms, "
        f"the whole head {row.head_ms:.1f} ms{memory} | difference {row.difference:.1e}, tolerance {row.tolerance:.1e}"
    )
