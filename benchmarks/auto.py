"""Quality of the choice that `impl="auto"` makes: `python -m benchmarks auto`.

A row is one mask at one length, forward alone or with backward, with the time of both implementations. The slowdown of
a choice is its time over the time of the faster implementation. The target for the cost model
(`attention/sparse/cost_model.py`) is a slowdown of at most 5 %.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from benchmarks.results import Row, gather
from benchmarks.sparse import ON_CPU, Inputs, Options, attend_under, tensors_for, time_both, time_forward
from clearhead.attention.attend import choose
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.normalizers import Softmax
from clearhead.attention.observe import Impl
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel
from clearhead.attention.sparse.cost_model import rates_for
from clearhead.attention.sparse.plan import plan
from clearhead.masks import Causal, Mask
from clearhead.masks.catalogue import CATALOGUE

IMPLS: tuple[Impl, ...] = ("sdpa", "sparse")
MAX_SLOWDOWN = 1.05


@dataclass(frozen=True, kw_only=True)
class Choice(Row):
    """One choice; times in ms.

    Attributes:
        name: Name of the mask in the catalogue.
        length: Number of tokens.
        heads: Batch size times heads.
        width: Head dim.
        dtype: Data type of the inputs.
        backward: Whether the backward pass is included.
        sdpa: Time of `impl="sdpa"`.
        sparse: Time of `impl="sparse"`.
        choice: The implementation that `impl="auto"` uses.
    """

    name: str
    length: int
    heads: int
    width: int
    dtype: str
    backward: bool
    sdpa: float
    sparse: float
    choice: str

    @property
    def slowdown(self) -> float:
        """Time of the chosen implementation over the time of the faster one."""
        return float(getattr(self, self.choice)) / min(self.sdpa, self.sparse)


def options_for(device: str, seconds: float, *, width: int = 64, dtype: torch.dtype | None = None) -> Options:
    """Return lengths near the break-even point of sparse attention, where the choice is hard."""
    lengths = (512, 1024, 2048, 4096)
    on_gpu = Options(lengths=(*lengths, 8192, 16384), device=device)
    options = replace(ON_CPU, lengths=lengths, heads=8) if device == "cpu" else on_gpu
    return replace(options, widths=(width,), dtype=dtype or options.dtype, seconds=seconds)


def measure(
    options: Options, out: Path | None = None, on_row: Callable[[Choice], None] = lambda row: None
) -> list[Choice]:
    """Measure choices until the time limit; write them to `out` as they are measured."""
    deadline = time.monotonic() + options.seconds

    def rows() -> Iterator[Choice]:
        for length, width in itertools.product(options.lengths, options.widths):
            tensors = tensors_for(options, length, width)
            for pattern in CATALOGUE:
                if time.monotonic() > deadline:
                    return
                yield from (_row(pattern.name, pattern.mask(length), tensors, backward) for backward in (False, True))

    return gather(rows(), out, on_row)


def _row(name: str, mask: Mask, tensors: Inputs, backward: bool) -> Choice:
    """Return the choice for one mask and the times of both implementations."""
    leaves = [x.detach().requires_grad_(backward) for x in tensors[:3]]
    inputs = AttentionInputs(leaves[0], leaves[1], leaves[2], mask, ScaledDot(), Softmax(), None, 0)
    choice = choose(inputs).kernel.name
    time_call = time_both if backward else time_forward
    times = {impl: time_call(attend_under(mask, impl), tensors) for impl in IMPLS}
    B, H, T, D = inputs.q.shape
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    return Choice(name=name, length=T, heads=B * H, width=D, dtype=dtype, backward=backward, choice=choice, **times)


def read_rows(path: Path) -> list[Choice]:
    """Return the rows of a results file; width and dtype default to 64 and bfloat16."""
    names = [field.name for field in fields(Choice)]
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [Choice(**{name: ({"width": 64, "dtype": "bfloat16"} | row)[name] for name in names}) for row in rows]


def choose_again(row: Choice) -> Choice:
    """Return the row with the choice that the current constants make for a GPU; no GPU is needed."""
    mask = next(pattern.mask(row.length) for pattern in CATALOGUE if pattern.name == row.name)
    if isinstance(mask, Causal):
        return replace(row, choice="sdpa")  # has a kernel for causal()
    gpu, dtype = torch.device("cuda"), getattr(torch, row.dtype)
    mask_plan = plan(mask, row.length, blocking=kernel.blocking_on(gpu, dtype, row.width, row.width))
    rates = rates_for(gpu, dtype).without_host()  # the rows contain device times
    prefers_sparse = kernel.beats_sdpa(mask_plan, row.heads, row.width, row.backward, rates, gpu)
    return replace(row, choice="sparse" if prefers_sparse else "sdpa")


def line(row: Choice) -> str:
    """Format a row for the terminal."""
    passes = "forward + backward" if row.backward else "forward"
    return (
        f"{row.name:28} T {row.length:6} {passes:18} sdpa {row.sdpa:9.3f} ms  sparse {row.sparse:9.3f} ms  "
        f"auto: {row.choice:8} {row.slowdown:6.3f}{'' if row.slowdown <= MAX_SLOWDOWN else '  TOO SLOW'}"
    )


def summary(rows: list[Choice]) -> str:
    """Return the number of choices that miss the target."""
    n_slow = sum(row.slowdown > MAX_SLOWDOWN for row in rows)
    return f"{n_slow} of {len(rows)} choices are slower than the best by more than {MAX_SLOWDOWN - 1:.0%}"
