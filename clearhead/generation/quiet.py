"""Running a model quietly: in evaluation mode while it runs, and afterwards as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def parts_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once. A short generation asks often, and `modules()` takes ten times as long."""
    found = {model: None}
    waiting = [model]
    while waiting:
        for part in waiting.pop()._modules.values():
            if part is not None and part not in found:
                found[part] = None
                waiting.append(part)
    return list(found)


@contextmanager
def evaluating(parts: Sequence[nn.Module]) -> Iterator[None]:
    """The parts of a model in evaluation mode; afterwards, whatever happened, each in the mode it was in.

    Several threads may run one model: the last of them to end gives its parts their mode back."""
    with _LOCK:
        held = [part for part in parts if part.training or part in _HELD]
        for part in held:
            _HELD[part] = _HELD.get(part, 0) + 1
            part.training = False
    try:
        yield
    finally:
        with _LOCK:
            for part in held:
                _HELD[part] -= 1
                if not _HELD[part]:
                    del _HELD[part]
                    part.training = True


_LOCK = threading.Lock()
_HELD: dict[nn.Module, int] = {}  # parts that were in training mode, and how many are running them now
