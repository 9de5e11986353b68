"""A room that is also a function: `ch.cost(config)` counts, `ch.cost.compare(...)` is the room's.

Importing a package's submodule binds its name in the package, so `clearhead.cost` is the module as soon as anyone has
imported it. Making the module itself callable lets one name be both, whatever was imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def make_callable(module: str, name: str) -> None:
    """Calling the module `module` calls its function `name`."""

    class Room(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, name)(*args, **kwargs)

    sys.modules[module].__class__ = Room
