"""Code blocks of the README."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    """Return the code of the fences of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
