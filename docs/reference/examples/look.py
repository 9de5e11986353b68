import torch
import clearhead as ch
from clearhead import look
from clearhead.models import tiny_decoder
from clearhead.pretrained import load
model, ids = ch.Decoder(tiny_decoder()).eval(), torch.arange(7)[None]


with look.trace(model) as t:  # a Trace
    model(ids)
t.weights("blocks.1.attention", heads=2, rows=-1).shape  # → torch.Size([1, 1, 1, 7])

with look.trace(model, "**.weights", "") as plain:
    model(ids)
with look.trace(model, "**.weights", "") as edited:
    edited.intervene("blocks.0.attention", look.ZeroAblation(heads=[2]))  # an Intervention
    model(ids)
print(look.compare(plain, edited))  # a TraceComparison

changes = (look.Intervention, look.MeanAblation, look.PatchActivation, look.ReplaceActivation(lambda x: 2 * x, heads=[0]))

album = look.attention_report(load("sort-dedup"), "D A A")  # an AttentionReport
page = look.render_page(album)
file = look.save_page(album, "page.html")

with look.trace(model) as t:
    model(ids)
album = look.build_report(t, [str(i) for i in range(7)], title="seven tokens")
shown = look.attention_maps(t)  # one AttentionMap per layer

weights = torch.full((2, 3, 3), 1 / 3)  # (H, T, S)
look.entropy(weights)[0, 0].exp().round().item()  # → 3.0

look.mean_attention_distance(torch.eye(3)[None]).sum().item()  # → 0.0

print(look.heatmap(torch.eye(3), ["a", "b", "c"], ["a", "b", "c"]))

look.classify_head(torch.eye(5)[None])[0].name  # one HeadLabel per head

look.rollout([torch.full((1, 3, 3), 1 / 3)] * 2).shape  # → torch.Size([3, 3])

look.value_weighted_norms(torch.rand(2, 5), torch.rand(2, 5), top=3)  # a list of ValueWeightedNorm

look.logit_lens(model, ids).logits.shape[0]  # of a LogitLens: one row per layer

found = look.attribute(model, ids, look.LogitMetric(token=3))  # an Attribution, a list of LogitContribution

grid = look.ablate(model, ids, granularity="head")  # a PatchingResult

grid = look.patch(model, ids, ids.flip(1))

heads = look.induction_scores(model, length=5, batch=1)  # an InductionScores

plane = look.pca(torch.randn(5, 8))  # a PCAProjection
chart = look.logit_lens(model, ids).charts()[0]  # a Chart

walked = look.build_walkthrough(load("sort-dedup"), "D A")  # a Walkthrough

question = look.model_inputs(load("sort-dedup"), "D A A")  # a ModelInputs

from clearhead.pretrained import translations
trained = load("en-es")
album = look.translation_report(trained, translations(trained, ["Hello world"])[0])
