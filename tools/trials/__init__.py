"""The kinds of trial that the campaign draws. A kind is a module with `draw(chance, device)`, which gives a case of
plain values, and `check(case)`, which raises `Broken` (or whatever breaks) and returns the names of what was tried."""

from __future__ import annotations

from types import ModuleType
from typing import Any

Case = dict[str, Any]


class Broken(Exception):
    """What was seen is not what the definition says."""


def kinds() -> dict[str, ModuleType]:
    """Every kind, by name, and how often it is drawn: see `SHARES`."""
    from tools.trials import attention, configs, files, generations, masks

    return {"attend": attention, "mask": masks, "config": configs, "file": files, "generate": generations}


SHARES = {"attend": 50, "mask": 25, "config": 10, "file": 10, "generate": 5}
