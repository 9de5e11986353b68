"""The handles by which operators and compiled graphs find plans."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from clearhead.attention.sparse.plan import Plan


class PlanRegistry:
    """The plans of the process.

    A plan cannot be an argument of a torch operator, so an operator gets its handle, an integer. The registry refers to
    plans weakly; the cache, the caller, the autograd node or `pin` keeps them alive."""

    def __init__(self) -> None:
        self._by_handle: WeakValueDictionary[int, Plan] = WeakValueDictionary()
        self._pinned: dict[int, Plan] = {}
        self._handles = itertools.count(1)

    def next_handle(self) -> int:
        """Return a handle for a new plan, unique within the process."""
        return next(self._handles)

    def add(self, plan: Plan) -> None:
        """Make a plan available to `by_handle` for as long as it is referenced."""
        self._by_handle[plan.handle] = plan

    def by_handle(self, handle: int) -> Plan:
        """Return the plan with this handle; it must still be referenced somewhere."""
        return self._by_handle[handle]

    def pin(self, plan: Plan) -> int:
        """Keep a plan for the life of the process, for a compiled graph, and return its handle."""
        self._pinned[plan.handle] = plan
        return plan.handle

    @property
    def pinned(self) -> tuple[Plan, ...]:
        """The plans of compiled graphs, the newest last."""
        return tuple(self._pinned.values())


PLANS = PlanRegistry()
"""The plans of this process."""
