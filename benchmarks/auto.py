"""`python -m benchmarks auto`: the choice that `impl="auto"` makes, beside what each way takes that it chooses from.

A row is one mask at one length, forward alone or with backward. What a choice loses is its time over that of the faster
way: the cost model of plans (`attention/sparse/cost_model.py`) is held to 5 %."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from benchmarks.results import Row, gather
from benchmarks.sparse import ON_CPU, Inputs, Options, our_way, tensors_for, time_both, time_forward
from clearhead.attention.attend import Impl, select_implementation
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel
from clearhead.attention.sparse.cost_model import rates_for
from clearhead.attention.sparse.plan import plan
from clearhead.masks import Causal, Mask
from clearhead.masks.catalogue import CATALOGUE

WAYS: tuple[Impl, ...] = ("sdpa", "sparse")
BOUND = 1.05


@dataclass(frozen=True, kw_only=True)
class Choice(Row):
    """One choice; times in ms."""

    name: str
    length: int
    heads: int
    width: int
    dtype: str
    backward: bool
    sdpa: float
    sparse: float
    chosen: str

    @property
    def lost(self) -> float:
        """The time of what was chosen over the time of the faster way."""
        return float(getattr(self, self.chosen)) / min(self.sdpa, self.sparse)


def options_for(device: str, seconds: float, *, width: int = 64, dtype: torch.dtype | None = None) -> Options:
    """Lengths at which the choice is hard: about where gathering begins to pay."""
    lengths = (512, 1024, 2048, 4096)
    on_gpu = Options(lengths=(*lengths, 8192, 16384), device=device)
    options = replace(ON_CPU, lengths=lengths, heads=8) if device == "cpu" else on_gpu
    return replace(options, widths=(width,), dtype=dtype or options.dtype, seconds=seconds)


def measure(
    options: Options, out: Path | None = None, on_row: Callable[[Choice], None] = lambda row: None
) -> list[Choice]:
    """Every choice there is time for, written to `out` as they come."""
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
    leaves = [x.detach().requires_grad_(backward) for x in tensors[:3]]
    call = AttentionInputs(leaves[0], leaves[1], leaves[2], mask, ScaledDot(), Softmax(), None, 0)
    chosen = select_implementation(call).name
    clock = time_both if backward else time_forward
    took = {way: clock(our_way(mask, way), tensors) for way in WAYS}
    B, H, T, D = call.q.shape
    dtype = str(call.q.dtype).removeprefix("torch.")
    return Choice(name=name, length=T, heads=B * H, width=D, dtype=dtype, backward=backward, chosen=chosen, **took)


def read_rows(path: Path) -> list[Choice]:
    """The rows of a results file; one that does not say is of width 64 and bfloat16."""
    names = [field.name for field in fields(Choice)]
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [Choice(**{name: ({"width": 64, "dtype": "bfloat16"} | row)[name] for name in names}) for row in rows]


def again(row: Choice) -> Choice:
    """The row with the choice that today's constants make on a GPU, which need not be here."""
    mask = next(pattern.mask(row.length) for pattern in CATALOGUE if pattern.name == row.name)
    if isinstance(mask, Causal):
        return replace(row, chosen="sdpa")  # which has a kernel for it
    gpu, dtype = torch.device("cuda"), getattr(torch, row.dtype)
    sparse_plan = plan(mask, row.length, blocking=kernel.blocking_on(gpu, dtype, row.width, row.width))
    gathers = kernel.beats_sdpa(sparse_plan, row.heads, row.width, row.backward, rates_for(gpu, dtype), gpu)
    return replace(row, chosen="sparse" if gathers else "sdpa")


def line(row: Choice) -> str:
    """A row for the terminal."""
    what = "forward + backward" if row.backward else "forward"
    return (
        f"{row.name:28} T {row.length:6} {what:18} sdpa {row.sdpa:9.3f} ms  sparse {row.sparse:9.3f} ms  "
        f"auto: {row.chosen:8} {row.lost:6.3f}{'' if row.lost <= BOUND else '  loses'}"
    )


def summary(rows: list[Choice]) -> str:
    losing = sum(row.lost > BOUND for row in rows)
    return f"{losing} of {len(rows)} choices lose more than {BOUND - 1:.0%}"
