"""Exceptions. Each is a `ClearheadError` and also the matching built-in, so `except ValueError` works as expected.

Messages state what was received, what was expected and what to do."""

from __future__ import annotations

from collections import abc
from contextlib import contextmanager


class ClearheadError(Exception):
    """Base class of all errors that clearhead raises."""


class ShapeError(ClearheadError, ValueError):
    """Incompatible sizes, or a length that a module does not support."""


class DtypeError(ClearheadError, TypeError):
    """Unsupported dtype of a tensor, or type of an object."""


class KeywordError(ClearheadError, TypeError):
    """Keyword argument that a function does not have."""


class MaskError(ClearheadError, ValueError):
    """Mask that is not defined for these sizes or arguments."""


class MaskTypeError(ClearheadError, TypeError):
    """Object that is not a `Mask`, such as a bare bool tensor, passed as a mask."""


class ParseError(MaskError):
    """Mask expression that cannot be parsed; `column` (from 1) is the position of the error."""

    def __init__(self, message: str, *, text: str = "", column: int = 0) -> None:
        super().__init__(message)
        self.text = text
        self.column = column


class ConfigError(ClearheadError, ValueError):
    """Configuration with invalid, contradictory or unknown fields."""


class ImplementationError(ClearheadError, RuntimeError):
    """Implementation that was requested by name and does not support the call."""


class StorageError(ClearheadError, OSError):
    """File or folder that is missing, corrupted or of an unexpected format."""


class DataError(ClearheadError, ValueError):
    """Unusable training data; the message names the file or line."""


class MissingDependencyError(ClearheadError, ImportError):
    """Optional library that is required here and not installed."""


@contextmanager
def optional_dependency(message: str) -> abc.Iterator[None]:
    """Convert an ImportError to a MissingDependencyError with a message that says how to install the library."""
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(message) from error
