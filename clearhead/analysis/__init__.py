"""Trace, interpret and visualize what a model computes, without changing the model.

Example:
    import clearhead as ch
    from clearhead import analysis

    with ch.trace(model, "decoder.blocks.*.cross_attention") as t:
        model(source, target)                                            # or generate(model, ...)
    t.weights("decoder.blocks.3.cross_attention", heads=2, rows=[0, 5])  # (B, 1, 2, S), recomputed on demand
    print(t.report())                                                    # implementations used, and rounding errors

    with ch.trace(model, "output") as edited:
        edited.intervene("decoder.blocks.3.cross_attention", ch.ZeroAblation(heads=[2]))
        model(source, target)
    print(analysis.compare(before, edited))                              # changes in activations and logits

    metric = analysis.LogitMetric(token=17, baseline=4)                  # difference of two logits
    analysis.logit_lens(model, ids).top()                                # prediction after each layer
    analysis.attribute(model, ids, metric).largest                       # heads and layers by their effect on a logit
    analysis.patch(model, clean, corrupted, metric)                      # blocks × positions, or heads
    analysis.ablate(model, ids)                                          # effect of removing each head

    logits, cache = analysis.run_with_cache(model, ids)                  # every output, and all attention weights
    cache["blocks.0.output"]                                             # activations by module path

    analysis.logit_lens(ch.pipeline("shakespeare"), "To be, or not")     # also attribute, patch and ablate
    analysis.attention_report(ch.pipeline("en-es"), "How are you?")      # all attention maps of a bundled model
"""

from __future__ import annotations

from clearhead.analysis.inputs.model_inputs import ModelInputs
from clearhead.analysis.inputs.pipelines import model_inputs
from clearhead.analysis.interp.attribution import Attribution, LogitContribution, attribute
from clearhead.analysis.interp.compare import TraceComparison, compare
from clearhead.analysis.interp.induction import InductionScores, induction_scores
from clearhead.analysis.interp.lens import LogitLens, logit_lens
from clearhead.analysis.interp.metric import LogitMetric
from clearhead.analysis.interp.patching import PatchingResult, ablate, patch
from clearhead.analysis.measures import (
    ValueWeightedNorm,
    entropy,
    mean_attention_distance,
    rollout,
    value_weighted_norms,
)
from clearhead.analysis.reports import attention_report, translation_report
from clearhead.analysis.tracing.edits import (
    Intervention,
    MeanAblation,
    PatchActivation,
    ReplaceActivation,
    ZeroAblation,
)
from clearhead.analysis.tracing.run_with_cache import run_with_cache
from clearhead.analysis.tracing.trace import Trace, trace
from clearhead.analysis.views.attention_map import AttentionMap, HeadLabel, classify_head
from clearhead.analysis.views.chart import Chart, PCAProjection, pca
from clearhead.analysis.views.page import render_page, save_page
from clearhead.analysis.views.report import AttentionReport, attention_maps, build_report
from clearhead.analysis.views.terminal import heatmap
from clearhead.analysis.walkthrough.walkthrough import Walkthrough, build_walkthrough

__all__ = [
    "AttentionMap", "AttentionReport", "Attribution", "Chart", "HeadLabel", "InductionScores", "Intervention",
    "LogitContribution", "LogitLens", "LogitMetric", "MeanAblation", "ModelInputs", "PCAProjection", "PatchActivation",
    "PatchingResult", "ReplaceActivation", "Trace", "TraceComparison", "ValueWeightedNorm", "Walkthrough",
    "ZeroAblation", "ablate", "attention_maps", "attention_report", "attribute", "build_report", "build_walkthrough",
    "classify_head", "compare", "entropy", "heatmap", "induction_scores", "logit_lens", "mean_attention_distance",
    "model_inputs", "patch", "pca", "render_page", "rollout", "run_with_cache", "save_page", "trace",
    "translation_report", "value_weighted_norms",
]  # fmt: skip
