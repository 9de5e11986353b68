"""What a plan should cost: pairs times the cost of a pair, for each kind of work, plus a fixed cost for each kernel.

The constants are measured; `python -m clearhead.bench.calibrate` measures a device and fits them. A device that was never
measured gets those of the nearest kind: what decides between implementations is their ratios.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Cost(NamedTuple):
    """Picoseconds for each pair of a query and a key, and for each pair and unit of width."""

    pair: float
    width: float

    def of(self, width: int) -> float:
        return self.pair + self.width * width


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each kind of work costs; a launch in milliseconds."""

    dense: Cost  # fused kernel without a mask
    masked: Cost  # fused kernel with a (T, S) mask
    full: Cost  # gathered kernel, tiles that need no test
    partial: Cost  # gathered kernel, tiles with a test
    launch: float


@dataclass(frozen=True)
class Rates:
    """A device: its costs forward, and forward and backward together, and how its kernels go about it.

    A dense causal kernel takes `causal_tile` keys at a time and computes the last tile of a row whole. `remainder` is what
    each `stride` of a mask adds for each of the T × S pairs (picoseconds) where the fused kernel is given it as a tensor.
    `in_chunks` says that gathered pieces are torch operations on chunks of blocks, and not one kernel.
    """

    name: str
    forward: Costs
    training: Costs
    causal_tile: int
    remainder: float = 0.0
    in_chunks: bool = False

    def milliseconds(
        self,
        *,
        dense: float = 0.0,
        masked: float = 0.0,
        full: float = 0.0,
        partial: float = 0.0,
        width: int,
        launches: float = 1,
        backward: bool = False,
    ) -> float:
        """The predicted time of so many pairs of each kind (all heads together)."""
        costs = self.training if backward else self.forward
        picoseconds = (
            dense * costs.dense.of(width)
            + masked * costs.masked.of(width)
            + full * costs.full.of(width)
            + partial * costs.partial.of(width)
        )
        return picoseconds / 1e9 + launches * costs.launch


WORTH_PLANNING = 1 << 18
"""Below this many pairs (T × S) planning costs more than it can save, and "auto" does not try."""

# At 16,384 tokens, 32 heads of width 64, bfloat16: fitted by `python -m clearhead.bench.calibrate --device cuda --sparse
# docs/results/sparse.json`. `masked`, which that file does not have, is an estimate forward (three times as long as without
# a mask) and in training one timing of window(2, 2) | every(4) at 4,096 tokens, 2.04 ms: `clearhead bench auto` repeats it.
H200 = Rates(
    "NVIDIA H200",
    Costs(
        dense=Cost(0.0, 0.007849),
        masked=Cost(0.0, 0.0250),
        full=Cost(0.0, 0.008690),
        partial=Cost(0.0, 0.01528),
        launch=0.0565,
    ),
    Costs(
        dense=Cost(0.0, 0.02965),
        masked=Cost(0.0, 0.0523),
        full=Cost(0.0, 0.03968),
        partial=Cost(0.0, 0.06015),
        launch=0.243,
    ),
    causal_tile=128,
)
# Two cores, float32, at 512 to 2,048 tokens, 8 heads of width 32 and 64. Three runs of
# `python -m clearhead.bench.calibrate --device cpu
# --lengths 512 1024 2048 --widths 32 64 --heads 8 --seconds 330 --out N.json`
# were fitted together (the least time of each call) by `--device cpu --samples 1.json 2.json 3.json`.
CPU = Rates(
    "CPU",
    Costs(
        dense=Cost(218.4, 20.86),
        masked=Cost(392.3, 21.41),
        full=Cost(387.8, 33.43),
        partial=Cost(925.6, 38.17),
        launch=0.248,
    ),
    Costs(
        dense=Cost(858.8, 76.14),
        masked=Cost(1161.0, 75.53),
        full=Cost(870.3, 114.1),
        partial=Cost(1999.0, 138.7),
        launch=0.956,
    ),
    causal_tile=512,
    remainder=6000.0,
    in_chunks=True,
)


def rates_of(device: torch.device) -> Rates:
    """The rates of the nearest measured kind of device."""
    return CPU if device.type == "cpu" else H200
