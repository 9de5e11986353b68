"""Transformers with nothing hidden: one code base that is at once the textbook, the laboratory and the engine.

    import clearhead as ch
    from clearhead import masks

    y = ch.attend(q, k, v, masks.causal() & masks.window(256, 0))

Importing this needs torch alone; the rooms that need more import it when they are used.
"""

from clearhead import masks, positions
from clearhead._version import __version__
from clearhead.attention import KVCache, MultiHeadAttention, attend
from clearhead.errors import ClearheadError
from clearhead.models import Decoder, Encoder, EncoderDecoder, VisionTransformer, load, save

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
    "load",
    "masks",
    "positions",
    "save",
]
