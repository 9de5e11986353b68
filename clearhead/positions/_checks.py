"""Questions asked of numbers, positions and ids before they are used.

Each helper says what was got and what was expected; those that look inside a tensor do so only where
looking is free of a device synchronisation and invisible to `torch.compile`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clearhead._numbers import has_numbers
from clearhead.errors import ConfigError, ShapeError


def whole(owner: str, name: str, value: Any, *, at_least: int) -> int:
    """`value`, if it is a whole number of at least `at_least`; a bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{owner}: {name} is {value!r}; expected a whole number of at least {at_least}.")
    return value


def above(owner: str, name: str, value: Any, low: float, *, at_most: float = math.inf) -> float:
    """`value` as a float, if it is a finite number above `low` (itself excluded) and at most `at_most`."""
    number = _number(value)
    if not (low < number <= at_most and math.isfinite(number)):
        limit = "" if at_most == math.inf else f" and at most {at_most:g}"
        raise ConfigError(f"{owner}: {name} is {value!r}; expected a number above {low:g}{limit}.")
    return number


def rate(owner: str, name: str, value: Any) -> float:
    """`value` as a float, if it can be a dropout rate: at least 0 and below 1."""
    number = _number(value)
    if not 0.0 <= number < 1.0:
        raise ConfigError(f"{owner}: {name} is {value!r}; expected a rate of at least 0 and below 1.")
    return number


def _number(value: Any) -> float:
    """A float, NaN for what is no number, so that every comparison refuses it."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def yes_or_no(owner: str, name: str, value: Any) -> bool:
    """`value`, if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{owner}: {name} is {value!r}; expected True or False.")
    return value


def one_of(owner: str, name: str, value: Any, choices: tuple[type, ...]) -> None:
    """Refuses a value that is not an instance of one of `choices`, and names the usual slip (a class, no
    brackets).
    """
    if isinstance(value, choices):
        return
    names = ", ".join(f"{choice.__name__}()" for choice in choices)
    slip = " That is the class: add the brackets." if isinstance(value, type) else ""
    raise ConfigError(f"{owner}: {name} is {value!r}; expected one of {names}.{slip}")


def stray(ids: Tensor, limit: int) -> int | None:
    """A value of `ids` outside 0 … limit − 1, or None.

    Only plain CPU tensors that have numbers are looked into: elsewhere the look would stall the device or
    break the graph, and the lookup itself still refuses (with a device assertion).
    """
    if ids.device.type != "cpu" or type(ids) is not Tensor or not has_numbers(ids) or ids.numel() == 0:
        return None
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0:
        return low
    return high if high >= limit else None


def beside(positions: Tensor, x: Tensor) -> Tensor:
    """`positions`, (T,) or (B, T), reshaped to broadcast against the leading axes of x (B, …, T, width)."""
    if x.ndim < 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}; expected (…, T, width), at least two axes.")
    T = x.shape[-2]
    if positions.ndim == 1 and positions.shape[0] == T:
        return positions
    if positions.ndim == 2 and x.ndim >= 3 and positions.shape[1] == T:
        rows = positions.shape[0]
        if rows == 1 or rows == x.shape[0]:
            return positions.reshape(rows, *[1] * (x.ndim - 3), T)
    raise ShapeError(
        f"positions have shape {tuple(positions.shape)} and x has shape {tuple(x.shape)}; expected one "
        f"position a token, ({T},), or one row of them for each of the batch, (B, {T})."
    )
