"""Transformers with nothing hidden: one code base that is at once the textbook, the laboratory and the engine.

    import clearhead as ch
    from clearhead import masks

    y = ch.attend(q, k, v, masks.causal() & masks.window(256, 0))

Importing this needs torch alone; the rooms that need more import it when they are used.
"""

from typing import TYPE_CHECKING, Any

from clearhead import masks, positions
from clearhead._version import __version__
from clearhead.attention import KVCache, MultiHeadAttention, attend
from clearhead.errors import ClearheadError
from clearhead.models import Decoder, Encoder, EncoderDecoder, VisionTransformer, load, save

if TYPE_CHECKING:
    from clearhead import check, cost
    from clearhead.generation import generate
    from clearhead.training import train

# Rooms further down the house, loaded when they are first used: importing clearhead stays light.
_LATER = {"generate": "clearhead.generation", "train": "clearhead.training"}
_ROOMS = {"check", "cost"}  # rooms that can be called


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"clearhead.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


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
    "check",
    "cost",
    "generate",
    "load",
    "masks",
    "positions",
    "save",
    "train",
]
