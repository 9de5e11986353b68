import torch
import clearhead as ch
from clearhead import analysis
from clearhead.hub import pipeline
from clearhead.models import tiny_decoder
model, ids = ch.Decoder(tiny_decoder()).eval(), torch.arange(7)[None]


with analysis.trace(model) as t:  # a Trace
    model(ids)
t.weights("blocks.1.attention", heads=2, rows=-1).shape  # → torch.Size([1, 1, 1, 7])

logits, cache = analysis.run_with_cache(model, ids)
cache["blocks.1.output"].shape  # → torch.Size([1, 7, 32])

with analysis.trace(model, "**.weights", "") as plain:
    model(ids)
with analysis.trace(model, "**.weights", "") as edited:
    edited.intervene("blocks.0.attention", analysis.ZeroAblation(heads=[2]))  # an Intervention
    model(ids)
print(analysis.compare(plain, edited))  # a TraceComparison

changes = (analysis.Intervention, analysis.MeanAblation, analysis.PatchActivation, analysis.ReplaceActivation(lambda x: 2 * x, heads=[0]))

report = analysis.attention_report(pipeline("sort-dedup"), "D A A")  # an AttentionReport
page = analysis.render_page(report)
file = analysis.save_page(report, "page.html")

with analysis.trace(model) as t:
    model(ids)
report = analysis.build_report(t, [str(i) for i in range(7)], title="seven tokens")
maps = analysis.attention_maps(t)  # one AttentionMap per layer

weights = torch.full((2, 3, 3), 1 / 3)  # (H, T, S)
analysis.entropy(weights)[0, 0].exp().round().item()  # → 3.0

analysis.mean_attention_distance(torch.eye(3)[None]).sum().item()  # → 0.0

print(analysis.heatmap(torch.eye(3), ["a", "b", "c"], ["a", "b", "c"]))

analysis.classify_head(torch.eye(5)[None])[0].name  # one HeadLabel per head

analysis.rollout([torch.full((1, 3, 3), 1 / 3)] * 2).shape  # → torch.Size([3, 3])

analysis.value_weighted_norms(torch.rand(2, 5), torch.rand(2, 5), top=3)  # a list of ValueWeightedNorm

analysis.logit_lens(model, ids).logits.shape[0]  # of a LogitLens: one row per layer

contributions = analysis.attribute(model, ids, analysis.LogitMetric(token=3))  # an Attribution, a list of LogitContribution

grid = analysis.ablate(model, ids, granularity="head")  # a PatchingResult

grid = analysis.patch(model, ids, ids.flip(1))

heads = analysis.induction_scores(model, length=5, batch=1)  # an InductionScores

plane = analysis.pca(torch.randn(5, 8))  # a PCAProjection
chart = analysis.logit_lens(model, ids).charts()[0]  # a Chart

walkthrough = analysis.build_walkthrough(pipeline("sort-dedup"), "D A")  # a Walkthrough

inputs = analysis.model_inputs(pipeline("sort-dedup"), "D A A")  # a ModelInputs

from clearhead.hub import translations
trained = pipeline("en-es")
report = analysis.translation_report(trained, translations(trained, ["Hello world"])[0])
