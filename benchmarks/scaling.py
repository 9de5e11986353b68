"""Time of three layers by length, predicted (lines) and measured (dots): `python -m benchmarks scaling`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.plotting import new_figure, plot_style, save_figure
from clearhead.analysis.cost import AttentionSizes, Machine, cost
from clearhead.analysis.cost.measure import measure_machine
from clearhead.analysis.cost.predict import set_impl
from clearhead.analysis.cost.timing import one_thread, time_of
from clearhead.errors import ConfigError


@dataclass(frozen=True)
class Point:
    """One layer at one length; times in seconds."""

    layer: str
    n: int
    flops: int
    predicted: float
    measured: float | None


@dataclass(frozen=True)
class ScalingResult:
    """The points of all layers, and the machine for which they were predicted (and on which they were measured)."""

    d: int
    k: int
    batch: int
    machine: Machine
    points: tuple[Point, ...]

    def points_of(self, layer: str) -> list[Point]:
        """Return the points of one layer."""
        return [point for point in self.points if point.layer == layer]

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return list(dict.fromkeys(point.layer for point in self.points))

    def to_dict(self) -> dict[str, Any]:
        """Return the results as a JSON document."""
        return asdict(self)


def measure_scaling(
    d: int = 64,
    lengths: Sequence[int] = (32, 64, 128, 256, 512, 1024, 2048),
    *,
    k: int = 3,
    batch: int = 1,
    device: torch.device | str = "cpu",
    machine: Machine | None = None,
    with_measured: bool = True,
    seconds: float = 0.2,
    on_point: Callable[[Point], None] = lambda point: None,
) -> ScalingResult:
    """Predict and measure the forward time of self-attention (reference implementation), a recurrent and a
    convolutional layer of width `d` at each length."""
    if min(d, k, batch, *lengths) < 1:
        raise ConfigError(f"d {d}, k {k}, batch {batch}, lengths {tuple(lengths)}; expected sizes of at least 1")
    machine = measure_machine(device) if machine is None else machine
    layers = {
        "self-attention": set_impl(AttentionSizes(d, 1).build(), "reference"),
        "recurrent": nn.RNN(d, d, batch_first=True),
        "convolution": nn.Conv1d(d, d, k, padding=k // 2),
    }
    target_device = torch.device(device)
    points = []
    for n in lengths:
        for name, layer in layers.items():
            x = torch.randn(batch, d, n) if name == "convolution" else torch.randn(batch, n, d)
            predicted = cost(layer, inputs=x, batch=batch, device=target_device.type)
            measured = _time(layer.to(target_device).eval(), x.to(target_device), seconds) if with_measured else None
            points.append(Point(name, n, predicted.forward.value, predicted.time(machine).seconds, measured))
            on_point(points[-1])
    return ScalingResult(d, k, batch, machine, tuple(points))


def lengths(least: int, most: int) -> list[int]:
    """Return the powers of two from `least` to `most`, and `most` itself."""
    powers = itertools.takewhile(lambda n: n < most, (least * 2**i for i in itertools.count()))
    return [*powers, most]


def _time(layer: nn.Module, x: Tensor, seconds: float) -> float:
    """Return the seconds of a forward pass."""
    with one_thread(x.device), torch.inference_mode():
        return time_of(lambda: layer(x), seconds=seconds)


@plot_style()
def plot_scaling(result: ScalingResult, path: str | Path) -> Path:
    """Plot predicted and measured time against length on logarithmic axes, to a PNG, SVG or PDF file."""
    figure = new_figure(7.0, 4.6)
    axes = figure.add_subplot()
    for number, layer in enumerate(result.layers):
        points = result.points_of(layer)
        line = [(point.n, 1e3 * point.predicted) for point in points]
        axes.plot(*zip(*line, strict=True), color=f"C{number}", label=f"{layer}, predicted")
        dots = [(point.n, 1e3 * point.measured) for point in points if point.measured is not None]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=f"C{number}", label=f"{layer}, measured")
    axes.axvline(2 * result.d, color="0.6", linestyle=":", linewidth=1)
    transform = axes.get_xaxis_transform()  # x in tokens, y as a fraction of the height
    axes.text(2.1 * result.d, 0.02, "n = 2d: scores overtake projections", transform=transform, fontsize=7, color="0.4")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens n", ylabel="forward time, ms")
    axes.set_title(f"One layer of width {result.d}, batch {result.batch}, on {result.machine.name}", fontsize=10)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.25)
    return save_figure(figure, Path(path))
