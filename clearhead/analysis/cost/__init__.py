"""Predict parameters, FLOPs, bytes accessed, memory and time of any module without computing anything.

Example:
    import clearhead as ch

    c = ch.cost("gpt2", tokens=1024, batch=8, training=True)
    c.parameters, c.forward.formula, c.memory.peak
    clearhead.analysis.cost.layer_comparison(n=1000, d=512, k=3)  # self-attention, recurrence and convolution
"""

from __future__ import annotations

from clearhead.analysis.cost.layer_comparison import compare
from clearhead.analysis.cost.machine import Machine
from clearhead.analysis.cost.predict import AttentionSizes, cost, preset
from clearhead.analysis.cost.result import Cost

__all__ = ["AttentionSizes", "Cost", "Machine", "compare", "cost", "preset"]
