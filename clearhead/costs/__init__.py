"""Predict parameters, FLOPs, bytes accessed, memory and time of any module without computing anything.

Example:
    import clearhead as ch

    c = ch.cost("gpt2", tokens=1024, batch=8, training=True)
    c.parameters, c.forward.formula, c.memory.peak
    clearhead.costs.compare(n=1000, d=512, k=3)  # self-attention, recurrence and convolution
"""

from __future__ import annotations

from clearhead.costs.compare import compare
from clearhead.costs.machine import Machine
from clearhead.costs.predict import AttentionSizes, cost, preset
from clearhead.costs.result import Cost

__all__ = ["AttentionSizes", "Cost", "Machine", "compare", "cost", "preset"]
