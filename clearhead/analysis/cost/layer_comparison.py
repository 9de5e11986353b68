"""Compare the cost of self-attention, recurrent and convolutional layers over n tokens of width d.

FLOPs are exact (two for each multiplication with its addition). They are given twice: for the part that mixes tokens
alone, as in the table of "Attention Is All You Need", and with the projections that every real layer has. The n at
which one layer overtakes another is solved symbolically.

    n tokens   d width   k kernel size   r window   h heads"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import sympy

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import check_int
from clearhead.errors import ConfigError

SYMBOLS = sympy.symbols("n d k r h", positive=True, integer=True)
FIELDS = ("order", "mixing_flops", "flops", "sequential_steps", "path_length", "memory", "parameters")


@dataclass(frozen=True)
class LayerFormulas:
    """Cost of one kind of layer as sympy expressions in n, d, k, r and h. Memory counts values, not bytes."""

    name: str
    order: sympy.Expr  # growth without constant factors, the column of the original table
    mixing_flops: sympy.Expr  # of the part that mixes tokens
    flops: sympy.Expr  # with the projections
    sequential_steps: sympy.Expr  # steps that cannot run in parallel
    path_length: sympy.Expr  # maximum path length between two tokens
    memory: sympy.Expr  # values saved for backward, without the n·d inputs
    parameters: sympy.Expr


@dataclass(frozen=True)
class Crossover:
    """The n at which two layers have the same cost, as an expression, or None if there is none."""

    left: str
    right: str
    quantity: str
    n: sympy.Expr | None
    value: float | None

    def __str__(self) -> str:
        if self.n is None:
            return f"{self.left} and {self.right} never cost the same ({self.quantity})"
        return f"{self.left} costs more than {self.right} beyond n = {self.n} = {self.value:g} ({self.quantity})"


@dataclass(frozen=True)
class LayerComparison:
    """The layers at given sizes, and their crossovers."""

    n: int
    d: int
    k: int
    window: int
    heads: int
    layers: tuple[LayerFormulas, ...]
    crossovers: tuple[Crossover, ...]

    @property
    def sizes(self) -> dict[sympy.Symbol, int]:
        """The value of each symbol."""
        return dict(zip(SYMBOLS, (self.n, self.d, self.k, self.window, self.heads), strict=True))

    @property
    def bottleneck(self) -> str:
        """The half of self-attention with more FLOPs at these sizes: "projections" or "scores"."""
        return "scores" if self.n > 2 * self.d else "projections"

    def rows(self) -> list[JSONObject]:
        """Return the values at these sizes, one row per layer."""
        sizes = self.sizes
        return [
            {"layer": layer.name, **{name: _number(getattr(layer, name).subs(sizes)) for name in FIELDS}}
            for layer in self.layers
        ]

    def to_dict(self) -> JSONObject:
        """Return sizes, values, formulas and crossovers as plain JSON values."""
        formulas = [{"layer": x.name} | {name: str(getattr(x, name)) for name in FIELDS} for x in self.layers]
        crossovers = [asdict(c) | {"n": None if c.n is None else str(c.n)} for c in self.crossovers]
        sizes = {name: getattr(self, name) for name in ("n", "d", "k", "window", "heads", "bottleneck")}
        return {**sizes, "rows": self.rows(), "formulas": formulas, "crossovers": crossovers}

    def __str__(self) -> str:
        headings = {
            "mixing_flops": ("mixing FLOPs", 14), "flops": ("FLOPs", 14), "sequential_steps": ("sequential", 12),
            "path_length": ("path", 8), "memory": ("memory", 12), "parameters": ("parameters", 12),
        }  # fmt: skip
        lines = [f"{'layer':<22}" + "".join(f"{heading:>{width}}" for heading, width in headings.values())]
        for row in self.rows():
            cells = (f"{row[name]:>{width}.6g}" for name, (_, width) in headings.items())
            lines.append(f"{row['layer']:<22}" + "".join(cells))
        return "\n".join(lines + [str(crossover) for crossover in self.crossovers])


def compare(n: int, d: int, k: int = 3, *, window: int | None = None, heads: int = 1) -> LayerComparison:
    """Compare self-attention, local self-attention, recurrent layers (simple and LSTM) and convolution.

    Args:
        n: Number of tokens.
        d: Width of the layers.
        k: Kernel size of the convolution.
        window: Keys per query of local attention. Default: `k`.
        heads: Attention heads; they must divide `d`.

    Returns:
        Formulas, values and crossovers; printing it shows a table.

    Raises:
        ConfigError: A size is not a positive whole number, or `heads` does not divide `d`.

    Example:
        >>> compare(1000, 512).bottleneck
        'projections'
    """
    sizes = {"n": n, "d": d, "k": k, "window": k if window is None else window, "heads": heads}
    for name, value in sizes.items():
        check_int(value, name, minimum=1)
    if d % heads:
        raise ConfigError(f"d {d} does not divide into {heads} heads; choose a number of heads that divides it")
    layers = _layers()
    values = dict(zip(SYMBOLS, sizes.values(), strict=True))
    attention, local, simple, lstm, convolution = layers
    pairs = [(attention, rival) for rival in (simple, lstm, convolution, local)] + [(simple, convolution)]
    crossovers = [
        _crossover(first, second, quantity, values)
        for quantity in ("order", "mixing_flops", "flops")
        for first, second in pairs
    ]
    return LayerComparison(n, d, k, sizes["window"], heads, layers, tuple(crossovers))


def _layers() -> tuple[LayerFormulas, ...]:
    n, d, k, r, h = SYMBOLS
    unit = sympy.Integer(1)
    all_pairs = 4 * n**2 * d
    local_pairs = 4 * n * r * d
    projections = 8 * n * d**2  # queries, keys, values, output
    local_path = sympy.ceiling(n / r)
    # Contiguous kernels need n/k layers to connect the ends; dilated kernels, as counted here, the logarithm.
    dilated_path = sympy.ceiling(sympy.log(n, k))
    rows = (
        ("self-attention", n**2 * d, all_pairs, projections + all_pairs, unit, unit, h * n**2 + 5 * n * d, 4 * d**2),
        (
            "local self-attention", n * r * d, local_pairs, projections + local_pairs, unit, local_path,
            h * n * r + 5 * n * d, 4 * d**2,
        ),
        ("recurrent", n * d**2, 2 * n * d**2, 4 * n * d**2, n, n, n * d, 2 * d**2),
        ("LSTM", n * d**2, 8 * n * d**2, 16 * n * d**2, n, n, 7 * n * d, 8 * d**2),
        ("convolution", k * n * d**2, 2 * k * n * d**2, 2 * k * n * d**2, unit, dilated_path, n * d, k * d**2),
    )  # fmt: skip
    return tuple(LayerFormulas(*row) for row in rows)


def _crossover(
    left: LayerFormulas, right: LayerFormulas, quantity: str, sizes: Mapping[sympy.Symbol, int]
) -> Crossover:
    """Solve left = right for n > 0."""
    n = SYMBOLS[0]
    unknown = sympy.Symbol("n", real=True)
    difference = sympy.cancel((getattr(left, quantity) - getattr(right, quantity)) / n).subs(n, unknown)
    solution = next((x for x in sympy.solve(difference, unknown) if x.subs(sizes).is_positive), None)
    if solution is None:
        return Crossover(left.name, right.name, quantity, None, None)
    return Crossover(left.name, right.name, quantity, sympy.factor(solution), _number(solution.subs(sizes)))


def _number(value: sympy.Expr) -> float:
    if not value.is_finite:  # a kernel of size 1 never reaches another token
        return float("inf")
    number = float(value)
    return int(number) if number.is_integer() else number
