"""Cost model of attention in wall-clock time: the longer one of device time and host time.

The device time is pairs times the cost per pair, for each kind of work, plus a fixed cost per kernel launch. The
constants are measured: `python tools/calibrate.py` measures a device and fits them. A device that was not measured gets
the constants of the most similar one; the choice of an implementation depends on their ratios only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class PairCost(NamedTuple):
    """Picoseconds per query-key pair, and per pair and unit of width."""

    pair: float
    width: float

    def of(self, width: int) -> float:
        """Return the picoseconds per pair for heads of this width."""
        return self.pair + self.width * width


@dataclass(frozen=True, kw_only=True)
class KernelCosts:
    """Costs of each kind of work, as `PairCost` or in milliseconds.

    Attributes:
        dense: Fused kernel without a mask.
        masked: Fused kernel with a (T, S) mask.
        full: Sparse kernel, tiles that need no test.
        partial: Sparse kernel, tiles with a test.
        launch: Per kernel launch.
        leaf: Per leaf of a mask that becomes a tensor for the fused kernel.
        scattered: Per such leaf that samples keys.
        moved: Per such leaf whose data are on another device and copied in every call.
        interval: Kernel of row intervals, per pair and for `ROW_PAIRS` more pairs per row.
        sdpa_host: Host time of a call of SDPA.
        leaf_host: Additional host time per leaf of a mask that becomes a tensor.
        plan_host: Host time of a call with a cached plan.
        interval_host: Host time of a call with row intervals, which it computes."""

    dense: PairCost
    masked: PairCost
    full: PairCost
    partial: PairCost
    launch: float
    leaf: float = 0.0
    scattered: float = 0.0
    moved: float = 0.0
    interval: PairCost = PairCost(0.0, 0.0)
    sdpa_host: float = 0.0
    leaf_host: float = 0.0
    plan_host: float = 0.0
    interval_host: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """The work of one call of attention, in the quantities that the cost model prices. `a + b` does both.

    Attributes:
        dense: Pairs of the fused kernel without a mask, over all heads.
        masked: Pairs of the fused kernel with a (T, S) mask.
        full: Pairs of the sparse kernel in tiles that need no test.
        partial: Pairs of the sparse kernel in tiles with a test.
        launches: Kernel launches.
        leaves: Leaves of a mask that become tensors for the fused kernel.
        scattered: Those of them that sample keys.
        moved: Those of them whose data are on another device.
        remainders: T × S pairs of `dilated` leaves that become tensors.
    """

    dense: float = 0.0
    masked: float = 0.0
    full: float = 0.0
    partial: float = 0.0
    launches: float = 0.0
    leaves: float = 0.0
    scattered: float = 0.0
    moved: float = 0.0
    remainders: float = 0.0

    def __add__(self, other: AttentionWork) -> AttentionWork:
        return AttentionWork(**{name: n + getattr(other, name) for name, n in vars(self).items()})


@dataclass(frozen=True)
class Rates:
    """The costs of a device, and properties of its kernels.

    Attributes:
        name: Name of the device.
        forward: Costs of the forward pass.
        training: Costs of forward and backward pass together.
        causal_tile: Keys per tile of the dense causal kernel, which computes the last tile of a row completely.
        remainder: Picoseconds per T × S pair and `dilated` leaf of a mask that becomes a tensor for the fused kernel.
        in_chunks: Sparse pieces are torch operations on chunks of blocks instead of one kernel.
        dense_launches: Launches that a dense piece counts as."""

    name: str
    forward: KernelCosts
    training: KernelCosts
    causal_tile: int
    remainder: float = 0.0
    in_chunks: bool = False
    dense_launches: float = 1.0

    def without_host(self) -> Rates:
        """Return the rates for device times, as if the host took no time."""
        forward, training = (
            replace(costs, sdpa_host=0.0, leaf_host=0.0, plan_host=0.0, interval_host=0.0)
            for costs in (self.forward, self.training)
        )
        return replace(self, forward=forward, training=training)

    def sdpa_ms(self, work: AttentionWork, *, width: int, backward: bool) -> float:
        """Return the predicted wall-clock time of SDPA for this work."""
        costs = self.training if backward else self.forward
        host_ms = costs.sdpa_host + work.leaves * costs.leaf_host
        return max(self.milliseconds(work, width=width, backward=backward), host_ms)

    def interval_ms(self, *, pairs: float, rows: float, width: int, backward: bool) -> float:
        """Return the predicted wall-clock time of the kernel of row intervals, for pairs and rows of all heads."""
        costs = self.training if backward else self.forward
        device_ms = costs.interval.of(width) * (pairs + ROW_PAIRS * rows) / 1e9 + costs.launch
        return max(device_ms, costs.interval_host)

    def milliseconds(self, work: AttentionWork, *, width: int, backward: bool = False) -> float:
        """Return the predicted time of this work for heads of this width."""
        costs = self.training if backward else self.forward
        pairs = (
            (work.dense, costs.dense),
            (work.masked, costs.masked),
            (work.full, costs.full),
            (work.partial, costs.partial),
        )
        picoseconds = sum(n * cost.of(width) for n, cost in pairs) + work.remainders * self.remainder
        mask_ms = work.leaves * costs.leaf + work.scattered * costs.scattered + work.moved * costs.moved
        return picoseconds / 1e9 + work.launches * costs.launch + mask_ms


ROW_PAIRS = 400
"""Number of pairs that cost as much as a row of the kernel of row intervals: tiles that its interval fills in part."""
WORTH_PLANNING = 1 << 18
"""Number of pairs (T × S) below which planning costs more than it can save, so `impl="auto"` does not plan."""

# At 512 to 131,072 tokens, 16 and 32 heads of width 64 and 128, bfloat16: `python tools/calibrate.py --device
# cuda --auto docs/results/auto.json docs/results/auto-128.json --sparse docs/results/sparse.json`.
H200 = Rates(
    "NVIDIA H200",
    KernelCosts(
        dense=PairCost(0.2601, 0.004434),
        masked=PairCost(0.7925, 0.008132),
        full=PairCost(0.1144, 0.007545),
        partial=PairCost(0.4313, 0.01863),
        launch=0.00719,
        leaf=0.0145,
        scattered=0.406,
        moved=0.302,
        interval=PairCost(0.23, 0.0061),
        sdpa_host=0.08,
        leaf_host=0.055,
        plan_host=0.13,
        interval_host=0.08,
    ),
    KernelCosts(
        dense=PairCost(0.7682, 0.01904),
        masked=PairCost(1.291, 0.03736),
        full=PairCost(0.7832, 0.02841),
        partial=PairCost(0.07697, 0.1045),
        launch=0.0267,
        leaf=0.0164,
        scattered=0.41,
        moved=0.641,
        interval=PairCost(1.2, 0.0226),
        sdpa_host=0.45,
        leaf_host=0.05,
        plan_host=0.9,
        interval_host=0.3,
    ),
    causal_tile=128,
)
# Float32 does not use tensor cores. At 512 to 16,384 tokens, 32 heads of width 64: the same command with
# `--auto docs/results/auto-float32.json`. Every call there has a mask; `dense` is derived from the attention rates in
# docs/results/cost.json.
H200_SINGLE = Rates(
    "NVIDIA H200, float32",
    KernelCosts(
        dense=PairCost(0.0, 0.115),
        masked=PairCost(0.0, 0.1452),
        full=PairCost(0.0, 0.3512),
        partial=PairCost(0.0, 0.392),
        launch=0.0301,
        leaf=0.00907,
        scattered=0.405,
        moved=0.239,
        interval=PairCost(0.0, 0.3512),
        sdpa_host=0.08,
        leaf_host=0.055,
        plan_host=0.13,
        interval_host=0.08,
    ),
    KernelCosts(
        dense=PairCost(0.0, 0.398),
        masked=PairCost(0.0, 0.4555),
        full=PairCost(0.0, 1.71),
        partial=PairCost(0.0, 2.04),
        launch=0.105,
        leaf=0.0,
        scattered=0.398,
        moved=0.328,
        interval=PairCost(0.0, 1.71),
        sdpa_host=0.45,
        leaf_host=0.05,
        plan_host=0.9,
        interval_host=0.3,
    ),
    causal_tile=128,
)
# Two cores, float32, at 512 to 2,048 tokens, 8 heads of width 32 and 64. Three runs of `python tools/calibrate.py
# --device cpu --lengths 512 1024 2048 --widths 32 64 --heads 8 --seconds 330 --out N.json` were fitted together (the
# least time of each call) by `--device cpu --samples 1.json 2.json 3.json`.
CPU = Rates(
    "CPU",
    KernelCosts(
        dense=PairCost(218.4, 20.86),
        masked=PairCost(392.3, 21.41),
        full=PairCost(387.8, 33.43),
        partial=PairCost(925.6, 38.17),
        launch=0.248,
    ),
    KernelCosts(
        dense=PairCost(858.8, 76.14),
        masked=PairCost(1161.0, 75.53),
        full=PairCost(870.3, 114.1),
        partial=PairCost(1999.0, 138.7),
        launch=0.956,
    ),
    causal_tile=512,
    remainder=6000.0,
    in_chunks=True,
    dense_launches=2.0,
)


def rates_for(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Rates:
    """Return the rates of the most similar measured device, for this dtype."""
    if device.type == "cpu":
        return CPU
    return H200_SINGLE if dtype == torch.float32 else H200
