"""Cache of plans, and the handles by which operators and compiled graphs find them.

A plan cannot be an argument of a torch operator, so an operator gets its handle, an integer. The registry holds plans
weakly; the caller, the autograd node or `pin_plan` keeps them alive."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from clearhead.attention.sparse.plan import Plan

MAX_CACHED_PLANS = 64
"""Number of cached plans; the least recently used one is evicted."""

_BY_HANDLE: WeakValueDictionary[int, Plan] = WeakValueDictionary()
_PINNED: dict[int, Plan] = {}
_HANDLES = itertools.count(1)


def next_handle() -> int:
    """Return a handle for a new plan, unique within the process."""
    return next(_HANDLES)


def register(plan: Plan) -> None:
    """Make a plan available to `plan_by_handle` for as long as it is referenced."""
    _BY_HANDLE[plan.handle] = plan


def plan_by_handle(handle: int) -> Plan:
    """Return the plan with this handle; it must still be referenced somewhere."""
    return _BY_HANDLE[handle]


def pin_plan(plan: Plan) -> int:
    """Keep a plan for the life of the process, for a compiled graph, and return its handle."""
    _PINNED[plan.handle] = plan
    return plan.handle


@lru_cache(MAX_CACHED_PLANS)
def cached_plan(build: Callable[..., Plan], versions: tuple[int, ...], *arguments: Any) -> Plan:
    """Return `build(*arguments)`, cached until a tensor of the mask is modified in place and `versions` change."""
    return build(*arguments)


def clear_plans() -> None:
    """Drop all cached plans. Plans pinned by compiled graphs stay."""
    cached_plan.cache_clear()
