"""Transformers with nothing hidden: one code base that is at once the textbook, the laboratory and the engine.

    import clearhead as ch
    from clearhead import masks

    y = ch.attend(q, k, v, masks.causal() & masks.window(256, 0))

Importing this needs torch alone; the rooms that need more import it when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clearhead import attention, masks, positions
from clearhead._version import __version__
from clearhead.attention import KVCache, MultiHeadAttention, attend, under
from clearhead.errors import ClearheadError
from clearhead.models import Decoder, Encoder, EncoderDecoder, VisionTransformer, save

if TYPE_CHECKING:
    from clearhead import claims, look, pretrained, work
    from clearhead.checks import check
    from clearhead.costs import cost
    from clearhead.generation import generate
    from clearhead.pretrained import load_model as load
    from clearhead.training import train

# What stands further down the house is loaded when it is first used: importing clearhead stays light.
_FUNCTIONS = {
    "check": "checks.check",
    "cost": "costs.cost",
    "generate": "generation.generate",
    "load": "pretrained.load_model",
    "train": "training.train",
}
_ROOMS = ("claims", "look", "pretrained", "work")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"clearhead.{name}")
    if name in _FUNCTIONS:
        room, _, function = _FUNCTIONS[name].partition(".")
        return getattr(import_module(f"clearhead.{room}"), function)
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "ClearheadError",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "KVCache",
    "MultiHeadAttention",
    "VisionTransformer",
    "__version__",
    "attend",
    "attention",
    "check",
    "claims",
    "cost",
    "generate",
    "load",
    "look",
    "masks",
    "positions",
    "pretrained",
    "save",
    "train",
    "under",
    "work",
]
