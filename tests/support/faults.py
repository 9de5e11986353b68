"""Fault injection: let a public function fail as a full disk or a killed process would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

NO_SPACE = OSError(28, "No space left on device")


@contextmanager
def failing(module: ModuleType, function: str, error: BaseException = NO_SPACE, *, after: int = 0) -> Iterator[None]:
    """Let calls of `module.function` raise an error inside the block, after the first `after` calls."""
    original = getattr(module, function)
    n_calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls > after:
            raise error
        return original(*args, **kwargs)

    with mock.patch.object(module, function, fail):
        yield
