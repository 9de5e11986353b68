"""Looking inside a run from outside: model files do not know of it.

with look.trace(model, "decoder.blocks.*.cross_attention") as t:
    model(source, target)                                            # or generate(model, ...)
t.weights("decoder.blocks.3.cross_attention", heads=2, rows=[0, 5])  # (B, 1, 2, S), recomputed when asked for
print(t.report())                                                    # what ran, and how far off the weights are

with look.trace(model, "output") as edited:
    edited.edit("decoder.blocks.3.cross_attention", look.Zero(heads=[2]))
    model(source, target)
print(look.compare(before, edited))                                  # what moved

look.lens(model, ids).top()                                          # what each layer would say
look.attribute(model, ids, look.Answer(token=17)).largest            # which head, which layer moved the answer
look.patch(model, clean, corrupted, look.Answer(17, versus=4))       # blocks × positions, or heads
look.ablate(model, ids)                                              # the answer without each head

look.at(pretrained.load("en-es"), "How are you?")                    # a trained model at work, with its tokens
"""

from __future__ import annotations

from clearhead.look.album import Album, album, pictures
from clearhead.look.attribution import Attribution, Part, attribute
from clearhead.look.chart import Chart, Plane, pca
from clearhead.look.compare import Comparison, compare
from clearhead.look.edit import Edit, Mean, Patch, Replace, Zero
from clearhead.look.lens import Lens, lens
from clearhead.look.measures import Contribution, contributions, distance, entropy, rollout
from clearhead.look.page import page, save_page
from clearhead.look.picture import HeadLabel, Picture, label
from clearhead.look.question import Answer, Question
from clearhead.look.repeats import Repeats, induction
from clearhead.look.sweep import Grid, ablate, patch
from clearhead.look.terminal import heatmap
from clearhead.look.trace import Trace, trace
from clearhead.look.trained import at, question, translation
from clearhead.look.walk import Walk, walk

__all__ = [
    "Album", "Answer", "Attribution", "Chart", "Comparison", "Contribution", "Edit", "Grid", "HeadLabel", "Lens",
    "Mean", "Part", "Patch", "Picture", "Plane", "Question", "Repeats", "Replace", "Trace", "Walk", "Zero", "ablate",
    "album", "at", "attribute", "compare", "contributions", "distance", "entropy", "heatmap", "induction", "label",
    "lens", "page", "patch", "pca", "pictures", "question", "rollout", "save_page", "trace", "translation", "walk",
]  # fmt: skip
