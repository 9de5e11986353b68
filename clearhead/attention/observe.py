"""Observe attention calls from outside the model.

    class CountCalls(AttentionObserver):
        calls = 0

        def on_attend(self, call, proceed):
            self.calls += 1
            return proceed(call)

    with observing(counter):
        model(ids)

An observer receives every `attend` call of its thread while it is registered. It runs the call with `proceed`, and may
pass a changed call or return another output. Graphs of `torch.compile` notify no observers, so that observers cause no
graph breaks. `clearhead.attention.third_party` notifies observers of torch's attention function too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from clearhead._core.call_types import Args, Kwargs
from clearhead.attention.biases.base import Bias
from clearhead.attention.normalizers import Normalizer
from clearhead.attention.scores import Scores
from clearhead.masks import Mask

Impl = Literal["auto", "reference", "sdpa", "sparse"]
"""Names of the implementations of `attend`; "auto" is the fastest one that supports the call."""


@dataclass(frozen=True)
class ObservedCall:
    """The arguments of an `attend` call, before validation.

    Attributes:
        sdpa_arguments: Positional and keyword arguments of `F.scaled_dot_product_attention`, if the call is one of
            torch's function; None for `attend`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    scores: Scores
    normalizer: Normalizer
    bias: Tensor | Bias | None
    query_offset: int | None
    impl: Impl = "auto"
    sdpa_arguments: tuple[Args, Kwargs] | None = None

    def with_mask(self, mask: Mask, query_offset: int) -> ObservedCall:
        """Return the call with another mask; a call of torch's function becomes one of `attend`."""
        return replace(self, mask=mask, query_offset=query_offset, sdpa_arguments=None)


Proceed: TypeAlias = Callable[[ObservedCall], Tensor]
"""Runs a call with the remaining observers and returns its output (B, H, T, E)."""


class AttentionObserver:
    """Base class of observers; the default methods change nothing."""

    changes_calls: ClassVar[bool] = False
    """Whether the observer changes arguments; such observers come first, so that the others get the changed call."""

    def on_attend(self, call: ObservedCall, proceed: Proceed) -> Tensor:
        """Return the output of an attention call."""
        return proceed(call)

    def on_written_out(self, weights: Tensor, v: Tensor, output: Tensor) -> Tensor:
        """Return the output of attention that a third-party module computes as softmax(q @ k.T) @ v.

        Args:
            weights: Weights (B, H, T, S), after the softmax and before dropout.
            v: Values (B, H, S, E).
            output: Product of weights, after dropout, and values (B, H, T, E).
        """
        return output

    def on_reorder(self, cache: object, rows: Tensor) -> None:
        """Handle `KVCache.reorder`, after the rows of the batch were selected."""


OBSERVERS: ContextVar[tuple[AttentionObserver, ...]] = ContextVar("attention_observers", default=())
"""The observers of the current thread, in the order in which they receive a call."""


def add_observer(observer: AttentionObserver) -> None:
    """Register an observer in the current thread, before earlier observers of its kind."""
    OBSERVERS.set(tuple(sorted((observer, *OBSERVERS.get()), key=lambda other: not other.changes_calls)))


def remove_observer(observer: AttentionObserver) -> None:
    """Remove an observer from the current thread, if it is registered."""
    OBSERVERS.set(tuple(other for other in OBSERVERS.get() if other is not observer))


@contextmanager
def observing(observer: AttentionObserver) -> Iterator[None]:
    """Register an observer in the current thread during the `with` block."""
    add_observer(observer)
    try:
        yield
    finally:
        remove_observer(observer)


def observe_call(call: ObservedCall, run: Proceed) -> Tensor:
    """Pass a call to the observers, and then to `run`, inside which attention is not observed again."""
    observers = OBSERVERS.get()
    token = OBSERVERS.set(())
    try:
        return _notify(call, observers, run)
    finally:
        OBSERVERS.reset(token)


def observe_reorder(cache: object, rows: Tensor) -> None:
    """Notify the observers that the batch of a cache was reordered."""
    if torch.compiler.is_compiling():
        return
    for observer in OBSERVERS.get():
        observer.on_reorder(cache, rows)


def observe_written_out(weights: Tensor, v: Tensor, output: Tensor) -> Tensor:
    """Pass attention that was computed by separate operations to the observers, and return its output."""
    observers = OBSERVERS.get()
    token = OBSERVERS.set(())
    try:
        for observer in reversed(observers):
            output = observer.on_written_out(weights, v, output)
    finally:
        OBSERVERS.reset(token)
    return output


def _notify(call: ObservedCall, observers: tuple[AttentionObserver, ...], run: Proceed) -> Tensor:
    if not observers:
        return run(call)
    return observers[0].on_attend(call, partial(_notify, observers=observers[1:], run=run))
