"""Trained models: those that come in the box, and any that `clearhead train` has written.

from clearhead import pretrained

model = pretrained.load("en-es")          # by name, or the folder of a run or a model
pretrained.translate(model, ["Hello world"])
"""

from __future__ import annotations

from clearhead.pretrained.evaluate import Evaluation, evaluate
from clearhead.pretrained.store import Trained, cards, load, names
from clearhead.pretrained.translate import translate

__all__ = ["Evaluation", "Trained", "cards", "evaluate", "load", "names", "translate"]
