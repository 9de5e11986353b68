"""Shape annotations: `Float[Tensor, "B H T D"]`.

jaxtyping checks them in the tests, where its import hook loads it first. Otherwise the names evaluate to the plain
tensor type, so that clearhead does not depend on jaxtyping."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int, Integer
else:

    class _Shaped:
        """`_Shaped[Tensor, "B T"]` is `Tensor`; the shape is ignored."""

        def __class_getitem__(cls, item: tuple[object, str]) -> object:
            return item[0]

    Bool = Float = Int = Integer = _Shaped

__all__ = ["Bool", "Float", "Int", "Integer"]
