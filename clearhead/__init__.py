"""Transformers with nothing hidden: one code base that is at once the textbook, the laboratory and the engine.

    import clearhead as ch
    from clearhead import masks

    y = ch.attend(q, k, v, masks.causal() & masks.window(256, 0))

Importing this needs torch alone, and not even that until something is used: each room is loaded when it is asked for,
so that `clearhead --help` answers at once."""

from typing import TYPE_CHECKING

from clearhead._lazy import lazy
from clearhead._version import __version__

if TYPE_CHECKING:
    from clearhead import attention, claims, look, masks, positions, pretrained, work
    from clearhead.attention import KVCache, MultiHeadAttention, attend, under
    from clearhead.checks import check
    from clearhead.costs import cost
    from clearhead.errors import ClearheadError
    from clearhead.generation import generate
    from clearhead.models import Decoder, Encoder, EncoderDecoder, VisionTransformer, save
    from clearhead.pretrained import load_model as load
    from clearhead.training import train

lazy(__name__)

__all__ = [
    "ClearheadError", "Decoder", "Encoder", "EncoderDecoder", "KVCache", "MultiHeadAttention", "VisionTransformer",
    "__version__", "attend", "attention", "check", "claims", "cost", "generate", "load", "look", "masks", "positions",
    "pretrained", "save", "train", "under", "work",
]  # fmt: skip
