"""The kinds of case that the fuzzer draws.

A kind is a module with `draw(chance, device)`, which returns a case of plain values, and `check(case)`, which raises
`CaseFailure` (or any other exception) if the case fails and otherwise returns the names of what it covered. It may set
`BUDGET`, the CPU time and memory of one case, and `prepare()`, which runs once before cases are checked.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

Case = dict[str, Any]


class CaseFailure(Exception):
    """A result differs from its definition."""


def kinds() -> dict[str, ModuleType]:
    """Return every kind by name; `KIND_WEIGHTS` has their frequencies."""
    from tools.fuzz_cases import attention, configs, files, generations, headers, masks, options

    return {
        "attend": attention,
        "mask": masks,
        "config": configs,
        "file": files,
        "generate": generations,
        "header": headers,
        "option": options,
    }


KIND_WEIGHTS = {"attend": 45, "mask": 20, "config": 10, "file": 12, "generate": 5, "header": 6, "option": 2}
