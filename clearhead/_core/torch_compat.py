"""Uses of torch that are not part of its public interface, each with the reason.

They are in one file, so that a new version of torch is checked in one place.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def keyed_forward_hooks(
    module: nn.Module,
    key: str,
    *,
    pre: Callable[..., object] | None = None,
    post: Callable[..., object] | None = None,
    prepend: bool = False,
    with_kwargs: bool = False,
) -> Iterator[None]:
    """Register hooks of a module's forward under a key of the caller, during the `with` block.

    torch numbers the hooks of all modules consecutively, and compiled layers have guards on these numbers. With the
    same key in each layer, one compiled graph serves all layers.

    Args:
        module: The module.
        key: Key of the hooks; a key that the module already has gets a number.
        pre: Called before forward.
        post: Called after forward, also after an exception.
        prepend: Whether `pre` runs before the other hooks.
        with_kwargs: Whether `pre` gets the keyword arguments and returns them.
    """
    hooks: Any = (module._forward_pre_hooks, module._forward_hooks)
    unique_key = key
    n = 1
    while any(unique_key in registered for registered in hooks):
        n += 1
        unique_key = f"{key} {n}"
    before, after = hooks
    if pre is not None:
        before[unique_key] = pre
        if with_kwargs:
            module._forward_pre_hooks_with_kwargs[unique_key] = True  # type: ignore[index]
        if prepend:
            before.move_to_end(unique_key, last=False)
    if post is not None:
        after[unique_key] = post
        module._forward_hooks_always_called[unique_key] = True  # type: ignore[index]
    try:
        yield
    finally:
        flags: Any = (module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called)
        for registered in (before, after, *flags):
            registered.pop(unique_key, None)


_PATCH_LOCK = threading.RLock()


@contextmanager
def patched_functions(replacements: Iterable[tuple[str, str, Callable[..., object]]]) -> Iterator[None]:
    """Replace functions of other libraries during the `with` block, for one thread at a time.

    Only for functions that fail on fake tensors and that no torch function mode can intercept.

    Args:
        replacements: Module name, function name and replacement; modules that are not imported are left out.
    """
    with _PATCH_LOCK:
        originals = []
        for module_name, name, replacement in replacements:
            module = sys.modules.get(module_name)
            if hasattr(module, name):
                originals.append((module, name, getattr(module, name)))
                setattr(module, name, replacement)
        try:
            yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)
