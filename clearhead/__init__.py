"""Transformers with nothing hidden: a textbook, a laboratory and an engine in one code base.

    import clearhead as ch
    from clearhead import masks

    y = ch.attend(q, k, v, masks.causal() & masks.window(256, 0))

Subpackages and torch are imported on first use, so that `clearhead --help` is fast."""

from typing import TYPE_CHECKING

from clearhead._core.lazy import lazy
from clearhead._version import __version__

if TYPE_CHECKING:
    from clearhead import analysis, attention, course, hub, masks, nn
    from clearhead._core.caches import clear_caches
    from clearhead.analysis import MeanAblation, PatchActivation, ReplaceActivation, ZeroAblation, trace
    from clearhead.analysis.checks import check
    from clearhead.analysis.cost import cost
    from clearhead.attention import attend
    from clearhead.errors import ClearheadError
    from clearhead.generation import generate
    from clearhead.hub import load, pipeline
    from clearhead.models import Decoder, Encoder, EncoderDecoder, VisionTransformer
    from clearhead.models import save_checkpoint as save
    from clearhead.nn import KVCache, MultiHeadAttention, apply_mask
    from clearhead.training import train

lazy(__name__)

__all__ = [
    "ClearheadError",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "KVCache",
    "MeanAblation",
    "MultiHeadAttention",
    "PatchActivation",
    "ReplaceActivation",
    "VisionTransformer",
    "ZeroAblation",
    "__version__",
    "analysis",
    "apply_mask",
    "attend",
    "attention",
    "check",
    "clear_caches",
    "cost",
    "course",
    "generate",
    "hub",
    "load",
    "masks",
    "nn",
    "pipeline",
    "save",
    "trace",
    "train",
]
