"""Observe the calls of all modules of a model, with hooks that are removed afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn

from clearhead._core.call_types import Args, Kwargs

OnEnter = Callable[[str, nn.Module, Args, Kwargs], None]
"""Called with path, module, positional and keyword arguments before a module runs."""

OnLeave = Callable[[str, nn.Module, object], None]
"""Called with path, module and output after a module has run; the output is None if it raised."""


@contextmanager
def observing_modules(model: nn.Module, on_enter: OnEnter, on_leave: OnLeave) -> Iterator[None]:
    """Notify of every call of the model and its submodules in this thread, during the `with` block.

    A module with several paths is reported by its first one.
    """
    thread = threading.get_ident()
    running: list[nn.Module] = []

    # While this thread registers the hook, torch calls it in other threads without the keyword arguments.
    def enter(path: str, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> None:
        if threading.get_ident() == thread:
            running.append(module)
            on_enter(path, module, args, kwargs or {})

    def leave(path: str, module: nn.Module, args: Args, output: object) -> None:
        # If a global hook of another library raised before the call, torch calls this hook without `enter`.
        if threading.get_ident() == thread and running and running[-1] is module:
            running.pop()
            on_leave(path, module, output)

    with ExitStack() as stack:
        for path, module in model.named_modules():
            before = module.register_forward_pre_hook(partial(enter, path), with_kwargs=True, prepend=True)
            stack.enter_context(before)
            stack.enter_context(module.register_forward_hook(partial(leave, path), always_call=True))
        yield
