"""Looking inside a run from outside: model files do not know of it.

with look.trace(model, "decoder.blocks.*.cross_attention") as t:
    model(source, target)                                            # or generate(model, ...)
t.weights("decoder.blocks.3.cross_attention", heads=2, rows=[0, 5])  # (B, 1, 2, S), recomputed when asked for
print(t.report())                                                    # what ran, and how far off the weights are

with look.trace(model, "output") as edited:
    edited.edit("decoder.blocks.3.cross_attention", look.Zero(heads=[2]))
    model(source, target)
print(look.compare(before, edited))                                  # what moved

look.at(pretrained.load("en-es"), "How are you?")                    # all layers of a trained model at work, with
its tokens
"""

from __future__ import annotations

from clearhead.look.album import Album, album, pictures
from clearhead.look.compare import Comparison, compare
from clearhead.look.edit import Edit, Mean, Patch, Replace, Zero
from clearhead.look.labels import HeadLabel, label
from clearhead.look.measures import Contribution, contributions, distance, entropy, rollout
from clearhead.look.page import page, save_page
from clearhead.look.picture import Picture
from clearhead.look.terminal import heatmap
from clearhead.look.trace import Trace, trace
from clearhead.look.trained import at, translation
from clearhead.look.walk import Walk, walk

__all__ = [
    "Album",
    "Comparison",
    "Contribution",
    "Edit",
    "HeadLabel",
    "Mean",
    "Patch",
    "Picture",
    "Replace",
    "Trace",
    "Walk",
    "Zero",
    "album",
    "at",
    "compare",
    "contributions",
    "distance",
    "entropy",
    "heatmap",
    "label",
    "page",
    "pictures",
    "rollout",
    "save_page",
    "trace",
    "translation",
    "walk",
]
