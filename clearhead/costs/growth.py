"""How three layers grow with the length: predicted by formula, and timed on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention import MultiHeadAttention
from clearhead.costs.baselines import Walk, recurrent_layer
from clearhead.costs.layers import Shape, linear
from clearhead.costs.machine import Machine, measure_machine, one_thread, time_of
from clearhead.costs.predict import AttentionSizes, cost, cost_of, setting
from clearhead.costs.result import Cost
from clearhead.errors import ConfigError
from clearhead.models.recurrent import RNN, RecurrentStack

__all__ = ["Growth", "Point", "growth"]


@dataclass(frozen=True)
class Point:
    """One layer at one length."""

    layer: str
    n: int
    operations: int
    predicted: float  # seconds
    measured: float | None


@dataclass(frozen=True)
class Growth:
    """The points of all layers, and the machine they were predicted for (and measured on)."""

    d: int
    k: int
    batch: int
    machine: Machine
    points: tuple[Point, ...]

    def of(self, layer: str) -> list[Point]:
        return [point for point in self.points if point.layer == layer]

    @property
    def layers(self) -> list[str]:
        return list(dict.fromkeys(point.layer for point in self.points))

    def to_dict(self) -> dict[str, Any]:
        return {
            "d": self.d,
            "k": self.k,
            "batch": self.batch,
            "machine": self.machine.to_dict(),
            "points": [asdict(point) for point in self.points],
        }


def growth(
    d: int = 64,
    lengths: Sequence[int] = (32, 64, 128, 256, 512, 1024, 2048),
    *,
    k: int = 3,
    heads: int = 1,
    batch: int = 1,
    device: torch.device | str = "cpu",
    machine: Machine | None = None,
    measured: bool = True,
    seconds: float = 0.2,
    on_point: Callable[[Point], None] = lambda point: None,
) -> Growth:
    """Forward time of self-attention (by the equation), a recurrent and a convolutional layer of width d over the
    lengths.
    """
    if min(d, k, batch, *lengths) < 1:
        raise ConfigError(f"d {d}, k {k}, batch {batch}, lengths {tuple(lengths)}; expected sizes of at least 1")
    machine = measure_machine(device) if machine is None else machine
    points = []
    for n in lengths:
        for name, predicted, run in _layers(n, d, k, heads, batch, device):
            with one_thread(device), torch.inference_mode():
                took = time_of(run, device, seconds=seconds) if measured else None
            points.append(Point(name, n, predicted.forward.value, predicted.time(machine).seconds, took))
            on_point(points[-1])
    return Growth(d, k, batch, machine, tuple(points))


def _layers(
    n: int, d: int, k: int, heads: int, batch: int, device: torch.device | str
) -> list[tuple[str, Cost, Callable[[], Tensor]]]:
    x = torch.randn(batch, n, d, device=device)
    with torch.device(device):
        attention = MultiHeadAttention(d, heads, impl="reference").eval()
        recurrent = RecurrentStack(RNN(), d, d, 1).eval()
        convolution = nn.Conv1d(d, d, k, padding=k // 2).eval()
    across = x.transpose(1, 2).contiguous()
    where = torch.device(device).type
    return [
        (
            "self-attention",
            cost(AttentionSizes(d, heads), tokens=n, batch=batch, impl="reference", device=where),
            lambda: attention(x),
        ),
        ("recurrent", _recurrent(n, d, batch, where), lambda: recurrent(x)),
        ("convolution", _convolution(n, d, k, batch, where), lambda: convolution(across)),
    ]


def _recurrent(n: int, d: int, batch: int, device: str) -> Cost:
    s = setting(batch, torch.float32, device=device)
    T, M = s.letter("T", n), s.letter("M", d)
    s.program.inputs.append(s.tensor("x", s.B * T * M))
    recurrent_layer(s, "recurrent", "recurrence", RNN(), "x", "y", Walk(T, M, M))
    return cost_of("recurrent", s, torch.float32)


def _convolution(n: int, d: int, k: int, batch: int, device: str) -> Cost:
    s = setting(batch, torch.float32, device=device)
    T, M = s.letter("T", n), s.letter("M", d)
    s.program.inputs.append(s.tensor("x", s.B * T * M))
    shape = Shape(s.B * T, M * s.letter("k", k), M)
    linear(s, "convolution", "convolution", "x", "y", shape, read=s.B * T * M)
    return cost_of("convolution", s, torch.float32)
