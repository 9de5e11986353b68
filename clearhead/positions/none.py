"""No positions at all: what is left is a model that sees a set (or the order that its mask alone gives away)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class NoPositions:
    """No encoding. Without a causal mask the model cannot tell one order of its tokens from another.

    Beyond the trained length: nothing ends, since nothing is encoded."""

    kind: ClassVar[Literal["none"]] = "none"
