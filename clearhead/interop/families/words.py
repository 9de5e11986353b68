"""What several families say with the same words: activations, rotary angles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clearhead.errors import StorageError
from clearhead.interop.family import Keys
from clearhead.layers import GELU, ReLU
from clearhead.positions import Positions, Rotary

# Several words may mean one thing; the first is the one that is written.
ACTIVATIONS = {
    "gelu_new": GELU(tanh=True),
    "gelu_pytorch_tanh": GELU(tanh=True),
    "gelu_fast": GELU(tanh=True),
    "gelu": GELU(),
    "relu": ReLU(),
}


def word_for(choice: object, words: Mapping[str, Any]) -> str:
    """The word that stands for a choice of ours."""
    for word, meaning in words.items():
        if meaning == choice:
            return word
    raise StorageError(f"there is no word for {choice} in a transformers configuration")


def read_rotary(keys: Keys, base: float = 10000.0) -> Rotary:
    """Rotary positions, as transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling) writes them."""
    rope = dict(keys("rope_parameters", None) or keys("rope_scaling", None) or {})
    keys("rope_scaling", None)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", keys("rope_theta", base))
    rope.pop("partial_rotary_factor", None) if rope.get("partial_rotary_factor") == 1.0 else None
    if kind != "default" or rope:
        raise StorageError(f"the rotary angles are {kind!r} with {rope}, which clearhead cannot express")
    return Rotary(base=float(theta))


def write_rotary(positions: Positions) -> dict[str, Any]:
    """Both spellings: transformers 4 and the servers read `rope_theta`, transformers 5 `rope_parameters`."""
    if not isinstance(positions, Rotary):
        raise StorageError(f"positions are {positions}; expected Rotary")
    return {
        "rope_theta": positions.base,
        "rope_parameters": {"rope_type": "default", "rope_theta": positions.base},
    }
