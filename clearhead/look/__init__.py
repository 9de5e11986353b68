"""Looking inside a run from outside: model files do not know of it.

with look.trace(model, "decoder.blocks.*.cross_attention") as t:
    model(source, target)
t.weights("decoder.blocks.3.cross_attention")   # (B, H, T, S)
"""

from __future__ import annotations

from clearhead.look.terminal import heatmap
from clearhead.look.trace import Trace, trace

__all__ = ["Trace", "heatmap", "trace"]
