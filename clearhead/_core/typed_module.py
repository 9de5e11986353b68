"""`Module`: `torch.nn.Module` whose calls have the types of `forward`; torch annotates calls of modules as Any."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

if TYPE_CHECKING:

    class HasForward(Protocol[P, R]):
        """A module with a typed `forward`."""

        @property
        def forward(self) -> Callable[P, R]: ...

    class Module(nn.Module):
        """`torch.nn.Module` with typed calls."""

        def __call__(self: HasForward[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...

else:
    Module = nn.Module
