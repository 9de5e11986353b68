"""The quantities that a `Cost` consists of: parts, query-key pairs, memory and times, and their display with units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from clearhead.analysis.cost.dispatch import AttentionRecord
from clearhead.analysis.cost.formulas import SymbolicCount
from clearhead.masks import Mask


@dataclass(frozen=True)
class PartCost:
    """Cost of one module, summed over the layers of its list.

    FLOPs are those of matrix products, two for each multiplication with its addition. `saved` are the bytes that are
    saved for backward."""

    name: str
    parameters: SymbolicCount
    forward: SymbolicCount
    backward: SymbolicCount
    bytes_accessed: SymbolicCount
    saved: SymbolicCount
    kernel_launches: int


@dataclass(frozen=True)
class AttentionPairs:
    """Query-key pairs of one head, summed over the batch: all, allowed by the mask, and computed."""

    dense: SymbolicCount
    allowed: SymbolicCount
    computed: SymbolicCount
    record: AttentionRecord = field(repr=False)
    planned: int  # pairs that the plan of the mask computes: the allowed ones, and the others of their tiles

    @property
    def mask(self) -> Mask | None:
        """The mask of the call."""
        return self.record.mask

    @property
    def runs_plan(self) -> bool:
        """Whether the call runs by the plan of its mask."""
        return self.record.plan is not None


@dataclass(frozen=True)
class MemoryCost:
    """Memory in bytes.

    Attributes:
        parameters: Parameters of the module.
        gradients: Their gradients, in training.
        optimizer: State of AdamW, in training.
        activations: Tensors saved for backward.
        attention_weights_naive: The (T, S) attention weights of all layers in float32, as the reference builds them.
        attention_statistics_fused: Statistics that the fused kernel saves instead.
        kv_cache: A `KVCache` of this length. Not part of `peak`.
        peak: Peak of one training step, or of one forward pass without gradients.
        peak_op: The operator that runs at the peak.
        peak_breakdown: The peak by kind of storage.
    """

    parameters: SymbolicCount
    gradients: SymbolicCount
    optimizer: SymbolicCount
    activations: SymbolicCount
    attention_weights_naive: SymbolicCount
    attention_statistics_fused: SymbolicCount
    kv_cache: SymbolicCount
    peak: SymbolicCount
    peak_op: str
    peak_breakdown: dict[str, SymbolicCount]

    def rows(self) -> Iterator[tuple[str, SymbolicCount]]:
        """Yield name and bytes of each count."""
        for name in _MEMORY_LABELS:
            yield name, getattr(self, name)

    def labeled_rows(self) -> Iterator[tuple[str, SymbolicCount]]:
        """Yield display label and bytes of each count."""
        for name, label in _MEMORY_LABELS.items():
            yield label, getattr(self, name)


_MEMORY_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "attention_weights_naive": "attention weights, naive",
    "attention_statistics_fused": "attention statistics, fused",
    "kv_cache": "KV cache",
    "peak": "peak",
}


@dataclass(frozen=True)
class PredictedTime:
    """Predicted seconds by phase, and by what limits them.

    `host_wait` is the time in which the device waits for its host: a kernel starts when it has been launched and the
    previous kernel has finished."""

    forward: float
    backward: float
    optimizer: float
    arithmetic: float
    memory_traffic: float
    kernel_launches: float
    host_wait: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.optimizer + self.host_wait

    @property
    def bottleneck(self) -> str:
        """The largest of arithmetic, memory traffic, kernel launches and host wait, as a label."""
        names = ("arithmetic", "memory_traffic", "kernel_launches", "host_wait")
        return max(names, key=lambda name: getattr(self, name)).replace("_", " ")


def readable_bytes(n: float) -> str:
    """Format bytes with binary units: 1,536 as "1.5 KiB"."""
    return _readable(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"])


def readable_count(n: float) -> str:
    """Format a count with decimal units: 1,500,000 as "1.5 M"."""
    return _readable(n, 1000, ["", "k", "M", "G", "T", "P", "E"])


def _readable(n: float, step: int, units: list[str]) -> str:
    while abs(n) >= step and len(units) > 1:
        n = n / step
        units = units[1:]
    return f"{n:.4g} {units[0]}".rstrip()
