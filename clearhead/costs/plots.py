"""Pictures of cost: how layers grow with the length, predicted (lines) and measured (dots)."""

from __future__ import annotations

from pathlib import Path

from clearhead.costs.growth import Growth
from clearhead.errors import MissingDependencyError

__all__ = ["plot_growth"]


def plot_growth(found: Growth, path: str | Path) -> Path:
    """Draws predicted and measured time against length, both axes logarithmic, into a PNG, SVG or PDF file."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib; install it with: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for number, layer in enumerate(found.layers):
        points = found.of(layer)
        n = [point.n for point in points]
        axes.plot(n, [1e3 * point.predicted for point in points], color=f"C{number}", label=f"{layer}, predicted")
        dots = [(point.n, 1e3 * point.measured) for point in points if point.measured is not None]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=f"C{number}", label=f"{layer}, measured")
    axes.axvline(2 * found.d, color="0.6", linestyle=":", linewidth=1)
    where = axes.get_xaxis_transform()  # x in tokens, y as a part of the height
    axes.text(2.1 * found.d, 0.02, "n = 2d: scores overtake projections", transform=where, fontsize=7, color="0.4")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens n")
    axes.set_ylabel("forward time, ms")
    axes.set_title(f"One layer of width {found.d}, batch {found.batch}, on {found.machine.name}", fontsize=10)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.25)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
