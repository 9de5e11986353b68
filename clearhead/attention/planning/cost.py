"""What a plan should cost: pairs over a rate, for each kind of work, plus a fixed cost for each kernel.

The H200's rates `dense`, `full` and `partial` were measured at 16,384 tokens, 32 heads of width 64, bfloat16 (dense
attention by cuDNN, and `window(256, 256)` by the gathered kernel). `masked`, `launch` and all of the CPU's are estimates:
good enough to order the ways to run, not to quote. `python -m clearhead.bench.sparse` is the command that measures. A
device that was never measured gets those of the nearest kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rates:
    """Billions of (pair × width) a second, forward; how many times as long backward takes; and ms for each launch."""

    name: str
    dense: float  # fused kernel without a mask
    masked: float  # fused kernel with a (T, S) mask
    full: float  # gathered kernel, tiles that need no test
    partial: float  # gathered kernel, tiles with a test
    launch: float
    backward: float = 2.65  # dense: five products instead of two, at a lower rate
    gathered_backward: float = 3.5  # seven products: scores are made twice

    def milliseconds(
        self,
        *,
        dense: float = 0.0,
        masked: float = 0.0,
        full: float = 0.0,
        partial: float = 0.0,
        width: int,
        launches: int = 1,
        backward: bool = False,
    ) -> float:
        """The predicted time of so many pairs of each kind (all heads together)."""
        by_fused = (dense / self.dense + masked / self.masked) * (1 + self.backward * backward)
        by_gathered = (full / self.full + partial / self.partial) * (1 + self.gathered_backward * backward)
        return (by_fused + by_gathered) * width / 1e6 + launches * self.launch * (1 + 2 * backward)


H200 = Rates(
    "NVIDIA H200",
    dense=121_000.0,
    masked=40_000.0,
    full=85_000.0,
    partial=65_000.0,
    launch=0.02,
    backward=2.7,
    gathered_backward=3.2,
)
CPU = Rates(
    "CPU", dense=20.0, masked=16.0, full=8.0, partial=8.0, launch=0.3, backward=3.0, gathered_backward=3.0
)


def rates_of(device: torch.device) -> Rates:
    """The rates of the nearest measured kind of device. Only ratios decide between implementations."""
    return CPU if device.type == "cpu" else H200
