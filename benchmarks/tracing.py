"""`python -m benchmarks tracing`: what watching a long run costs, and what the weights of one head cost afterwards.

One forward pass of a decoder is timed with and without a trace of one attention layer, in turn; the trace's own start
and end are part of it. Then the weights of a few rows of one head are recomputed, and the whole head in pieces. On a
GPU the model has the sizes of GPT-2 and reads 16,384 tokens in bfloat16; on a CPU a small one stands in, for trying
the command.
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

BOUND = 1.10
"""How much longer a forward pass may take with a trace of one layer."""
MASKS: tuple[Mask, ...] = (causal(), causal() & (window(256, 0) | every(64)))


@dataclass(frozen=True)
class Watched(Row):
    """One mask. Times in ms, memory in bytes; memory is None on a CPU, where it is not counted."""

    mask: str
    length: int
    layers: int
    dtype: str
    plain_ms: float
    traced_ms: float
    ratio: float
    bound: float
    kept_bytes: int  # what the trace keeps alive: q, k, v and the output of the layer
    extra_peak_bytes: int | None  # of the forward pass with the trace, beyond the one without
    rows: int
    rows_ms: float  # weights of so many rows of one head
    rows_peak_bytes: int | None
    head_ms: float  # the whole head, in pieces
    head_peak_bytes: int | None
    square_bytes: int  # what T × T weights of one head would take at once
    difference: float  # of those rows, from what the fast path gave
    tolerance: float

    @property
    def holds(self) -> bool:
        peak = self.rows_peak_bytes or 0
        return self.ratio <= self.bound and peak < self.square_bytes and self.difference <= self.tolerance


@dataclass(frozen=True)
class Options:
    """The model that is watched, and how often it runs."""

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
        """The layer that is watched: one in the middle."""
        return f"blocks.{self.layers // 2}.attention"


def options_for(device: str) -> Options:
    """GPT-2's sizes and 16,384 tokens on a GPU; on a CPU a model and a length that take seconds."""
    if device != "cpu":
        return Options(device=device)
    return Options(length=1024, layers=4, width=64, heads=4, device=device, dtype=torch.float32, repeats=4)


def measure(
    options: Options, out: Path | None = None, on_row: Callable[[Watched], None] = lambda row: None
) -> list[Watched]:
    """A row for each mask, written to `out` as soon as it is there."""
    return gather((_row(mask, options) for mask in MASKS), out, on_row)


@torch.no_grad()
def _row(mask: Mask, options: Options) -> Watched:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": options.width, "n_heads": options.heads, "n_layers": options.layers}
    few_ids = 256  # so that what is measured is the blocks and not the logits
    config = DecoderConfig(vocab_size=few_ids, max_len=options.length, **sizes, positions=Rotary(), mask=mask)
    model = config.build().to(device=options.device, dtype=options.dtype).eval()
    ids = torch.randint(few_ids, (1, options.length), device=options.device)
    head, few = options.heads // 2, range(options.length // 2, options.length // 2 + options.rows)

    def traced() -> analysis.Trace:
        with analysis.trace(model, f"{options.layer}.weights") as t:
            model(ids)
        return t

    def walk() -> None:
        """How much weight falls on each key: something that needs every weight of a head, and keeps none."""
        total = torch.zeros(options.length, device=options.device)
        for _, piece in t.weight_blocks(options.layer, head):
            total += piece.sum((0, 1))

    plain = partial(model, ids)
    name = f"forward with a trace of {options.layer} / without"
    times = compare(name, traced, plain, bound=BOUND, repeats=options.repeats)
    peak, with_trace = _peak(plain, options), _peak(traced, options)
    t = traced()
    rows_ms, rows_peak = _cost(lambda: t.weights(options.layer, heads=head, rows=few), options)
    head_ms, head_peak = _cost(walk, options)
    about: dict[str, Any] = {"mask": str(mask), "length": options.length, "layers": options.layers}
    passes: dict[str, Any] = {"plain_ms": times.peer_ms, "traced_ms": times.ours_ms, "ratio": times.ratio}
    return Watched(
        **about,
        dtype=str(options.dtype).removeprefix("torch."),
        **passes,
        bound=times.bound,
        kept_bytes=4 * ids.numel() * options.width * options.dtype.itemsize,
        extra_peak_bytes=None if peak is None or with_trace is None else max(0, with_trace - peak),
        rows=options.rows,
        rows_ms=rows_ms,
        rows_peak_bytes=rows_peak,
        head_ms=head_ms,
        head_peak_bytes=head_peak,
        square_bytes=4 * options.length**2,
        difference=t.difference(options.layer, heads=head, rows=few),
        tolerance=t.tolerance(options.layer, heads=head, rows=few),
    )


def _cost(call: Callable[[], object], options: Options) -> tuple[float, int | None]:
    """Milliseconds of the second call, and the memory it takes at its peak beyond what was there."""
    seconds(call)
    return 1e3 * seconds(call), _peak(call, options)


def _peak(call: Callable[[], object], options: Options) -> int | None:
    if options.device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    return peak_of(call) - before


def line(row: Watched) -> str:
    """A row for people."""
    memory = ""
    if row.rows_peak_bytes is not None:
        extra, rows, square = (
            f"{n / 1e6:.0f} MB" for n in (row.extra_peak_bytes or 0, row.rows_peak_bytes, row.square_bytes)
        )
        memory = f" | peak + {extra} | rows + {rows} of {square}"
    return (
        f"{row.mask}, {row.length:,} tokens: forward {row.plain_ms:.1f} ms, traced {row.traced_ms:.1f} ms "
        f"({row.ratio:.3f}, wanted ≤ {row.bound:g}) | {row.rows} rows of a head {row.rows_ms:.2f} ms, "
        f"all of it {row.head_ms:.1f} ms{memory} | off by {row.difference:.1e}, allowed {row.tolerance:.1e}"
    )
