"""Self-attention, recurrence and convolution side by side: what a layer of each costs at n tokens of width d.

Operations are exact counts (two for each multiplication with its addition), once for what mixes tokens alone, as
the well-known table of 2017 counts, and once with the projections that every real layer has. Where one layer
overtakes another is solved for n.

    n tokens   d width   k kernel   r window   h heads"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sympy

from clearhead.errors import ConfigError
from clearhead.values import whole

LETTERS = sympy.symbols("n d k r h", positive=True, integer=True)
FIELDS = ("order", "mixing", "operations", "sequential", "path", "memory", "parameters")


@dataclass(frozen=True)
class Layer:
    """One kind of layer; every field is a sympy expression in n, d, k, r, h. Memory counts numbers, not bytes."""

    name: str
    order: Any  # how it grows, without factors: the well-known table's column
    mixing: Any  # operations that mix tokens, as the table of 2017 counts them
    operations: Any  # with the projections
    sequential: Any  # steps that must wait for each other
    path: Any  # the longest way between two tokens
    memory: Any  # numbers kept for backward beyond the n·d that come in
    parameters: Any


@dataclass(frozen=True)
class Crossing:
    """Where two layers cost the same: n as an expression, or None where they never do."""

    left: str
    right: str
    of: str
    n: Any | None
    value: float | None

    def __str__(self) -> str:
        if self.n is None:
            return f"{self.left} and {self.right} never cost the same ({self.of})"
        return f"{self.left} costs more than {self.right} beyond n = {self.n} = {self.value:g} ({self.of})"


@dataclass(frozen=True)
class Comparison:
    """Layers at given sizes, and where they cross."""

    n: int
    d: int
    k: int
    window: int
    heads: int
    layers: tuple[Layer, ...]
    crossings: tuple[Crossing, ...]

    @property
    def sizes(self) -> dict[Any, int]:
        return dict(zip(LETTERS, (self.n, self.d, self.k, self.window, self.heads), strict=True))

    @property
    def bottleneck(self) -> str:
        """Which half of self-attention has more operations here: the projections or the scores."""
        return "scores" if self.n > 2 * self.d else "projections"

    def rows(self) -> list[dict[str, Any]]:
        """The numbers at these sizes."""
        sizes = self.sizes
        return [
            {"layer": layer.name, **{name: _number(getattr(layer, name).subs(sizes)) for name in FIELDS}}
            for layer in self.layers
        ]

    def to_dict(self) -> dict[str, Any]:
        formulas = [{"layer": x.name} | {name: str(getattr(x, name)) for name in FIELDS} for x in self.layers]
        crossings = [asdict(c) | {"n": None if c.n is None else str(c.n)} for c in self.crossings]
        found = {name: getattr(self, name) for name in ("n", "d", "k", "window", "heads", "bottleneck")}
        return {**found, "rows": self.rows(), "formulas": formulas, "crossings": crossings}

    def __str__(self) -> str:
        widths = {"mixing": 12, "operations": 14, "sequential": 12, "path": 8, "memory": 12, "parameters": 12}
        lines = [f"{'layer':<22}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
        for row in self.rows():
            lines.append(f"{row['layer']:<22}" + "".join(f"{row[name]:>{width}.6g}" for name, width in widths.items()))
        return "\n".join(lines + [str(crossing) for crossing in self.crossings])


def compare(n: int, d: int, k: int = 3, *, window: int | None = None, heads: int = 1) -> Comparison:
    """Self-attention, local self-attention, recurrence (simple and LSTM) and convolution at n tokens of width d.

    `k` is the convolution's kernel, `window` how many keys a query of local attention sees (k unless given)."""
    sizes = {"n": n, "d": d, "k": k, "window": k if window is None else window, "heads": heads}
    for name, value in sizes.items():
        whole(value, name, least=1)
    if d % heads:
        raise ConfigError(f"d {d} does not divide into {heads} heads; choose a number of heads that divides it")
    layers = _layers()
    at = dict(zip(LETTERS, sizes.values(), strict=True))
    attention, local, simple, lstm, convolution = layers
    pairs = [(attention, other) for other in (simple, lstm, convolution, local)] + [(simple, convolution)]
    crossings = [_cross(a, b, of, at) for of in ("order", "mixing", "operations") for a, b in pairs]
    return Comparison(n, d, k, sizes["window"], heads, layers, tuple(crossings))


def _layers() -> tuple[Layer, ...]:
    n, d, k, r, h = LETTERS
    one = sympy.Integer(1)
    all_pairs, near = 4 * n**2 * d, 4 * n * r * d
    projected = 8 * n * d**2  # queries, keys, values, output
    reach = sympy.ceiling(n / r)
    # Kernels side by side need n/k layers to join the ends; dilated ones, as counted here, the logarithm.
    joined = sympy.ceiling(sympy.log(n, k))
    rows = (
        ("self-attention", n**2 * d, all_pairs, projected + all_pairs, one, one, h * n**2 + 5 * n * d, 4 * d**2),
        ("local self-attention", n * r * d, near, projected + near, one, reach, h * n * r + 5 * n * d, 4 * d**2),
        ("recurrent", n * d**2, 2 * n * d**2, 4 * n * d**2, n, n, n * d, 2 * d**2),
        ("LSTM", n * d**2, 8 * n * d**2, 16 * n * d**2, n, n, 7 * n * d, 8 * d**2),
        ("convolution", k * n * d**2, 2 * k * n * d**2, 2 * k * n * d**2, one, joined, n * d, k * d**2),
    )
    return tuple(Layer(*row) for row in rows)


def _cross(left: Layer, right: Layer, of: str, at: Mapping[Any, int]) -> Crossing:
    """Solves left = right for n > 0."""
    n = LETTERS[0]
    free = sympy.Symbol("n", real=True)
    difference = sympy.cancel((getattr(left, of) - getattr(right, of)) / n).subs(n, free)
    found = next((x for x in sympy.solve(difference, free) if x.subs(at).is_positive), None)
    at_n = (None, None) if found is None else (sympy.factor(found), _number(found.subs(at)))
    return Crossing(left.name, right.name, of, *at_n)


def _number(value: Any) -> float:
    if not value.is_finite:  # a kernel of one place never reaches another
        return float("inf")
    number = float(value)
    return int(number) if number.is_integer() else number
