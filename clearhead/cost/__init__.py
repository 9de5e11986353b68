"""What it costs: parameters, operations, bytes and time of any model, predicted by formula before it is built, and
measured.

from clearhead.cost import cost c = cost("gpt2", tokens=1024, batch=8, training=True) c.parameters,
c.forward.formula, c.memory.peak
"""

from __future__ import annotations

from clearhead.cost.compare import compare
from clearhead.cost.predict import AttentionSizes, cost, preset
from clearhead.cost.result import Cost

__all__ = ["AttentionSizes", "Cost", "compare", "cost", "preset"]

cost.compare = compare  # type: ignore[attr-defined]  # cost(...) for a model, cost.compare(...) for kinds of layers
