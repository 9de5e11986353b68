"""Evaluation mode while a model generates, and its previous mode afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def iter_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, each once.

    Short generations call this often, and `nn.Module.modules` takes ten times as long.
    """
    modules = {model: None}
    pending = [model]
    while pending:
        for child in pending.pop()._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                pending.append(child)
    return list(modules)


@contextmanager
def eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, and restore the mode of each on exit.

    Several threads may run one model; the last of them to exit restores the modes.
    """
    with _LOCK:
        switched = [module for module in modules if module.training or module in _N_USERS]
        for module in switched:
            _N_USERS[module] = _N_USERS.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _LOCK:
            for module in switched:
                _N_USERS[module] -= 1
                if not _N_USERS[module]:
                    del _N_USERS[module]
                    module.training = True


_LOCK = threading.Lock()
_N_USERS: dict[nn.Module, int] = {}  # modules that were in training mode, and the number of threads running them
