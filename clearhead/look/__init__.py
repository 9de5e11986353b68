"""Looking inside a run from outside: model files do not know of it.

with look.trace(model, "decoder.blocks.*.cross_attention") as t:
    model(source, target)                                            # or generate(model, ...)
t.weights("decoder.blocks.3.cross_attention", heads=2, rows=[0, 5])  # (B, 1, 2, S), recomputed when asked for
print(t.report())                                                    # what ran, and how far off the weights are

with look.trace(model, "output") as edited:
    edited.edit("decoder.blocks.3.cross_attention", look.ZeroAblation(heads=[2]))
    model(source, target)
print(look.compare(before, edited))                                  # what moved

look.logit_lens(model, ids).top()                                          # what each layer would say
look.attribute(model, ids, look.LogitMetric(token=17)).largest            # which head, which layer moved the answer
look.patch(model, clean, corrupted, look.LogitMetric(17, versus=4))       # blocks × positions, or heads
look.ablate(model, ids)                                              # the answer without each head

look.attention_report(pretrained.load("en-es"), "How are you?")                    # a trained model at work, with its tokens
"""

from __future__ import annotations

from clearhead.look.album import AttentionReport, album, pictures
from clearhead.look.attribution import Attribution, LogitContribution, attribute
from clearhead.look.chart import Chart, PCAProjection, pca
from clearhead.look.compare import TraceComparison, compare
from clearhead.look.edit import Intervention, MeanAblation, PatchActivation, ReplaceActivation, ZeroAblation
from clearhead.look.lens import LogitLens, lens
from clearhead.look.measures import ValueWeightedNorm, contributions, distance, entropy, rollout
from clearhead.look.page import page, save_page
from clearhead.look.picture import HeadLabel, AttentionMap, label
from clearhead.look.question import LogitMetric, ModelInputs
from clearhead.look.repeats import InductionScores, induction
from clearhead.look.sweep import PatchingResult, ablate, patch
from clearhead.look.terminal import heatmap
from clearhead.look.trace import Trace, trace
from clearhead.look.trained import at, question, translation
from clearhead.look.walk import Walkthrough, walk

__all__ = [
    "AttentionReport", "LogitMetric", "Attribution", "Chart", "Comparison", "Contribution", "Edit", "Grid", "HeadLabel", "Lens",
    "Mean", "Part", "Patch", "AttentionMap", "PCAProjection", "Question", "InductionScores", "Replace", "Trace", "Walk", "Zero", "ablate",
    "album", "at", "attribute", "compare", "contributions", "distance", "entropy", "heatmap", "induction", "label",
    "lens", "page", "patch", "pca", "pictures", "question", "rollout", "save_page", "trace", "translation", "walk",
]  # fmt: skip
