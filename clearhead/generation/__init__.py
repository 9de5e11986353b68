"""New ids from a model: greedy, by chance, or by beam search, over a cache.

A search knows ids and logits, never text, and reaches a model through three methods (`Stepper`).

    from clearhead.generation import Beam, Sample, generate, stream

    generate(decoder, [[5, 3], [7, 2, 9]], how=Sample(temperature=0.8, seed=1), max_new=50, stop=0).best
    generate(translator, sources, start=1, stop=2, how=Beam(5, length_penalty=0.6)).best"""

from __future__ import annotations

from clearhead.generation.choices import Beam, Generated, Greedy, How, Sample, Step
from clearhead.generation.generate import generate, search, stream
from clearhead.generation.limits import Limits, Times
from clearhead.generation.stepper import LogitsError, Recompute, Stepper

__all__ = [
    "Beam", "Generated", "Greedy", "How", "Limits", "LogitsError", "Recompute", "Sample", "Step", "Stepper", "Times",
    "generate", "search", "stream",
]  # fmt: skip
