"""The kinds of case that the fuzzer draws.

A kind is a module with `draw(chance, device)`, which returns a case of plain values, and `check(case)`, which raises
`Broken` (or any other exception) if the case fails and otherwise returns the names of what it covered. A module may set
`BUDGET`, the CPU time and memory of one case, and `prepare()`, which runs once before cases are checked.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

Case = dict[str, Any]


class Broken(Exception):
    """A result differs from its definition."""


def kinds() -> dict[str, ModuleType]:
    """Return every kind by name; `SHARES` has their frequencies."""
    from tools.trials import attention, configs, files, generations, headers, masks, options

    return {
        "attend": attention,
        "mask": masks,
        "config": configs,
        "file": files,
        "generate": generations,
        "header": headers,
        "option": options,
    }


SHARES = {"attend": 45, "mask": 20, "config": 10, "file": 12, "generate": 5, "header": 6, "option": 2}
