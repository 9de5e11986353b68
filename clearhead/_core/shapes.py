"""Shapes in signatures: `Float[Tensor, "B H T D"]`.

jaxtyping reads and checks them in the tests, where its import hook loads it first. Everywhere else the names stand for
the plain tensor type, so that importing clearhead needs torch alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int, Integer
else:

    class _Shaped:
        """`_Shaped[Tensor, "B T"]` is `Tensor`: the shape is for people."""

        def __class_getitem__(cls, item: Any) -> Any:
            return item[0]

    Bool = Float = Int = Integer = _Shaped

__all__ = ["Bool", "Float", "Int", "Integer"]
