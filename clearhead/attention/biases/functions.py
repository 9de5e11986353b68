"""Functions of the distance d = |j − p| between key and query, the arguments of `distance`.

A parameter is a number for all heads, or a tensor with one value per head, (H,) or (), which may be learned."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor

from clearhead._core.validation import short_repr
from clearhead.errors import ConfigError, DtypeError, ShapeError

Coefficient: TypeAlias = float | Tensor
"""A number, or a tensor with one value per head."""


@dataclass(frozen=True, eq=False, repr=False)
class DistanceFunction(ABC):
    """A function of the distance between key and query; `distance` makes a bias of it.

    `names` are the names of its tensors in the text of an expression; by default, those of the parameters."""

    names: tuple[str, ...]

    @property
    def coefficients(self) -> tuple[Coefficient, ...]:
        """The parameters, in order."""
        return tuple([getattr(self, name) for name in self._coefficient_names()])

    def values(self, d: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values (H or 1, N) at the distances d (N,), which are floating-point."""
        return self.evaluate(d[None], [_as_column(x, d.device, dtype) for x in self.coefficients])

    @abstractmethod
    def evaluate(self, d: Tensor, coefficients: list[Coefficient]) -> Tensor:
        """Return the values (H or 1, N) at the distances d (1, N); coefficients are numbers or (H or 1, 1)."""

    def _coefficient_names(self) -> list[str]:
        return [field.name for field in fields(self) if field.name != "names"]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and have_same_arguments(self.coefficients, other.coefficients)

    def __hash__(self) -> int:
        return hash((type(self), *[id(x) if isinstance(x, Tensor) else x for x in self.coefficients]))

    def __str__(self) -> str:
        names = self.names or self._coefficient_names()
        pairs = zip(self.coefficients, names, strict=True)
        return f"{type(self).__name__.lower()}({', '.join([argument_text(x, name) for x, name in pairs])})"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Linear(DistanceFunction):
    """slope · d; see `linear`."""

    slope: Coefficient

    def evaluate(self, d: Tensor, coefficients: list[Coefficient]) -> Tensor:
        return coefficients[0] * d


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Clipped(DistanceFunction):
    """slope · min(d, limit); see `clipped`."""

    slope: Coefficient
    limit: Coefficient

    def evaluate(self, d: Tensor, coefficients: list[Coefficient]) -> Tensor:
        slope, limit = coefficients
        return slope * (torch.minimum(d, limit) if isinstance(limit, Tensor) else d.clamp(max=limit))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Logarithm(DistanceFunction):
    """scale · log(1 + rate · d); see `logarithm`."""

    scale: Coefficient
    rate: Coefficient

    def evaluate(self, d: Tensor, coefficients: list[Coefficient]) -> Tensor:
        scale, rate = coefficients
        return scale * torch.log1p(rate * d)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Power(DistanceFunction):
    """scale · d^exponent; see `power`."""

    scale: Coefficient
    exponent: Coefficient

    def evaluate(self, d: Tensor, coefficients: list[Coefficient]) -> Tensor:
        scale, exponent = coefficients
        return scale * d.pow(exponent)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Gaussian(DistanceFunction):
    """−d² / (2 · width²); see `gaussian`."""

    width: Coefficient

    def evaluate(self, d: Tensor, coefficients: list[Coefficient]) -> Tensor:
        ratio = d / coefficients[0]
        return -0.5 * ratio * ratio


def linear(slope: Coefficient) -> Linear:
    """Return the function slope · d, as in ALiBi; a negative slope prefers near keys.

    Args:
        slope: Bias per position of distance: a number, or a tensor with one value per head.

    Returns:
        The function.
    """
    return Linear((), slope=_coefficient(slope, "linear: slope"))


def clipped(slope: Coefficient, limit: Coefficient) -> Clipped:
    """Return the function slope · min(d, limit): linear up to a distance, and constant beyond it.

    Args:
        slope: Bias per position of distance: a number, or a tensor with one value per head.
        limit: Distance from which on the function is constant, at least 0.

    Returns:
        The function.
    """
    slope, limit = _coefficient(slope, "clipped: slope"), _coefficient(limit, "clipped: limit", least=0.0)
    return Clipped((), slope=slope, limit=limit)


def logarithm(scale: Coefficient, rate: Coefficient = 1.0) -> Logarithm:
    """Return the function scale · log(1 + rate · d), the logarithmic kernel of KERPLE (Chi et al., 2022).

    Args:
        scale: Factor of the logarithm: a number, or a tensor with one value per head; negative values prefer near keys.
        rate: Factor of the distance, at least 0.

    Returns:
        The function.
    """
    scale, rate = _coefficient(scale, "logarithm: scale"), _coefficient(rate, "logarithm: rate", least=0.0)
    return Logarithm((), scale=scale, rate=rate)


def power(scale: Coefficient, exponent: Coefficient) -> Power:
    """Return the function scale · d^exponent, the power kernel of KERPLE (Chi et al., 2022).

    Args:
        scale: Factor of the power: a number, or a tensor with one value per head; negative values prefer near keys.
        exponent: Exponent, above 0.

    Returns:
        The function.
    """
    scale, exponent = _coefficient(scale, "power: scale"), _coefficient(exponent, "power: exponent", above=0.0)
    return Power((), scale=scale, exponent=exponent)


def gaussian(width: Coefficient) -> Gaussian:
    """Return the function −d² / (2 · width²), which multiplies the weights by a Gaussian window around the query.

    Args:
        width: Standard deviation of the window in positions, above 0: a number, or a tensor with one value per head.

    Returns:
        The function.
    """
    return Gaussian((), width=_coefficient(width, "gaussian: width", above=0.0))


def per_head(value: Tensor, label: str) -> Tensor:
    """Return a tensor with one value per head; raise for other shapes and dtypes."""
    if not value.is_floating_point():
        raise DtypeError(f"{label} is {value.dtype}; expected a floating-point tensor with one value per head")
    if value.dim() > 1 or 0 in value.shape:
        raise ShapeError(f"{label} has shape {tuple(value.shape)}; expected one value per head, (H,), or a scalar, ()")
    return value


def have_same_arguments(left: tuple[object, ...], right: tuple[object, ...]) -> bool:
    """Return whether arguments are equal; a tensor is equal to itself only."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if a is not b and (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b):
            return False
    return True


def argument_text(value: object, name: str) -> str:
    """Return the text of an argument: its value, or the name of a tensor."""
    return name if isinstance(value, Tensor) else repr(value)


def _coefficient(value: object, label: str, *, least: float = -math.inf, above: float = -math.inf) -> Coefficient:
    """Return a number or a tensor of one value per head; raise for other values."""
    if isinstance(value, Tensor):
        return per_head(value, label)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(f"{label} is {short_repr(value)}; expected a number or a tensor with one value per head")
    if not (math.isfinite(value) and value >= least and value > above):
        bound = f" of at least {least:g}" if least > -math.inf else f" above {above:g}" if above > -math.inf else ""
        raise ConfigError(f"{label} is {value}; expected a finite number{bound}")
    return float(value)


def _as_column(value: Coefficient, device: torch.device, dtype: torch.dtype) -> Coefficient:
    """Return a number unchanged, and one value per head as (H or 1, 1)."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=torch.promote_types(dtype, value.dtype)).reshape(-1, 1)
