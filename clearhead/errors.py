"""What went wrong, in the caller's words.

Every error this project raises on purpose is a `ClearheadError` and also the built-in error that a caller would expect,
so `except ValueError` keeps working. A message says what was got, what was expected, and what to do."""

from __future__ import annotations

from collections import abc
from contextlib import contextmanager


class ClearheadError(Exception):
    """The base of every error that clearhead raises on purpose."""


class ShapeError(ClearheadError, ValueError):
    """Sizes that do not fit each other, or a length that a part cannot take."""


class DtypeError(ClearheadError, TypeError):
    """A tensor of a dtype (or an object of a type) that cannot be used here."""


class MaskError(ClearheadError, ValueError):
    """A mask that is not defined for the sizes or arguments it was given."""


class MaskTypeError(ClearheadError, TypeError):
    """Something that is not a `Mask` where a mask is wanted, such as a bare bool tensor."""


class ParseError(MaskError):
    """A mask expression that cannot be read; `column` (from 1) is where reading stopped."""

    def __init__(self, message: str, *, text: str = "", column: int = 0) -> None:
        super().__init__(message)
        self.text, self.column = text, column


class ConfigError(ClearheadError, ValueError):
    """A configuration that contradicts itself or names something unknown."""


class ImplementationError(ClearheadError, RuntimeError):
    """An implementation was asked for by name and cannot run this call."""


class StorageError(ClearheadError, OSError):
    """A file or folder that is missing, torn, or not what it says it is."""


class DataError(ClearheadError, ValueError):
    """Training data that cannot be used, with the line or file that shows it."""


class MissingDependencyError(ClearheadError, ImportError):
    """An optional library is needed for what was asked."""


@contextmanager
def needing(sentence: str) -> abc.Iterator[None]:
    """Around imports of an optional library: if it is missing, the sentence says what needs it and how to get it."""
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(sentence) from error
