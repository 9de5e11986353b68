"""Descriptions of errors that third-party modules raise."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch


def error_summary(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def source_line(error: BaseException) -> str | None:
    """Return the last line of user code in the traceback: not in torch, the import system or this package."""
    library_paths = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), "<frozen ")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(library_paths) and Path(frame.filename).parent.name != "importlib"
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else None
