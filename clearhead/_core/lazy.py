"""Lazy imports: the names of a package are loaded on first access, so that a command imports only what it uses.

A package writes its imports under `if TYPE_CHECKING:`, where type checkers read them, and then calls `lazy(__name__)`,
which parses the same imports. Without an `__all__`, they also define the public names."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


class _Lazy(ModuleType):
    """Package that maps each of its names to a module and the name in that module."""

    _sources: dict[str, tuple[str, str]]

    def __getattr__(self, name: str) -> object:
        if name not in self._sources:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        source, attribute = self._sources[name]
        if source == self.__name__:
            value: object = import_module(f"{source}.{attribute}")
        else:
            value = getattr(import_module(source), attribute)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # A submodule may have the same name as the function that it defines; the import system must not overwrite it.
        is_shadowing = isinstance(value, ModuleType) and self._sources.get(name, (self.__name__,))[0] != self.__name__
        if not is_shadowing:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        names: list[str] = self.__dict__["__all__"]
        return list(names)


def lazy(package: str) -> None:
    """Make a package load names on first access, from the imports under `if TYPE_CHECKING:` in its own file."""
    module = sys.modules[package]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    type_checking = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = [node for body in type_checking for node in body if isinstance(node, ast.ImportFrom)]
    sources = {name.asname or name.name: (str(node.module), name.name) for node in imports for name in node.names}
    module.__dict__["_sources"] = sources
    module.__dict__.setdefault("__all__", sorted(sources))
    module.__class__ = _Lazy
