"""Types of the arguments of calls that are observed: of modules, and of torch functions and operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch._ops import OpOverload

Args: TypeAlias = tuple[Any, ...]
"""Positional arguments of any call."""

Kwargs: TypeAlias = dict[str, Any]
"""Keyword arguments of any call."""

TorchFunction: TypeAlias = Callable[..., Any]
"""A function of torch that a torch function mode intercepts."""

Operator: TypeAlias = OpOverload
"""An operator that a dispatch mode intercepts."""
