"""Packages whose names are loaded when they are asked for, so that a command imports only what it uses.

A package writes its imports under `if TYPE_CHECKING:`, where type checkers read them, and then `lazy(__name__)`. The
same imports say here where each name lives and, where there is no `__all__`, which are public: none is listed twice."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    """A package that knows the homes of its names: the module and the name there, where a room is its own home."""

    _homes: dict[str, tuple[str, str]]

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home, own = self._homes[name]
        found = import_module(f"{home}.{own}") if home == self.__name__ else getattr(import_module(home), own)
        self.__dict__[name] = found
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # A file may have the name of the function that it holds: the import system must not put it in its place.
        if not (isinstance(value, ModuleType) and self._homes.get(name, (self.__name__,))[0] != self.__name__):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(self.__all__)


def lazy(package: str) -> None:
    """Let a package load each name when it is asked for, by the imports under `if TYPE_CHECKING:` in its own file."""
    module = sys.modules[package]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    under = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = [node for body in under for node in body if isinstance(node, ast.ImportFrom)]
    homes = {name.asname or name.name: (str(node.module), name.name) for node in imports for name in node.names}
    module.__dict__["_homes"] = homes
    module.__dict__.setdefault("__all__", sorted(homes))
    module.__class__ = _Lazy
