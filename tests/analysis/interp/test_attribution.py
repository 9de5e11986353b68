"""Attribution of a logit, compared with forward hooks and formulas for several kinds of models."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from clearhead import analysis
from clearhead.errors import ConfigError
from tests.analysis.interp.subjects import (
    CASES,
    KINDS,
    V,
    decoder,
    forward_hooks,
    gpt2,
    ids,
    randomize,
    record_with_hooks,
    rounding,
    run_logits,
)


def test_attribute_contributions_sum_to_logit(case):
    name, model, model_args, _ = case
    logits = run_logits(model, model_args)
    for metric in (
        analysis.LogitMetric(),
        analysis.LogitMetric(token=3),
        analysis.LogitMetric(token=4, baseline=1, position=2),
    ):
        attribution = analysis.attribute(model, model_args, metric)
        rows = logits[0] if logits.dim() == 2 else logits[0, metric.position]
        token = int(rows.argmax()) if metric.token is None else metric.token
        expected = rows[token] - (0 if metric.baseline is None else rows[metric.baseline])
        assert attribution.metric.token == token
        assert attribution.logit == pytest.approx(float(expected), abs=0.0)
        size = sum(abs(part.value) for part in attribution.parts)
        assert abs(attribution.residual) <= rounding(size, name=name)
        assert attribution.tolerance < 1e-3 * size
        assert len({(part.path, part.head) for part in attribution.parts}) == len(attribution.parts)


def ablate_with_hooks(model, model_args, token):
    """Return the change of the logit without each (path, head) of a clearhead model.

    Forward hooks fix the scales of the norms and the outputs of all other branches to those of the run.
    """
    blocks = range(len(model.blocks))
    layers = [f"blocks.{i}.attention" for i in blocks]
    branches = ["embedding", *layers, *(f"blocks.{i}.feed_forward" for i in blocks)]
    norms = {path: m for path, m in model.named_modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm))}
    projections = [f"{path}.o_proj" for path in layers]
    inputs, outputs, _ = record_with_hooks(model, [*branches, *norms, *projections], model_args)

    def frozen(path):
        x = inputs[path]
        centred = x - x.mean(-1, keepdim=True) if isinstance(norms[path], nn.LayerNorm) else x
        scale = (centred.square().mean(-1, keepdim=True) + norms[path].eps).rsqrt()

        def hook(module, args, output):
            x = args[0] - args[0].mean(-1, keepdim=True) if isinstance(module, nn.LayerNorm) else args[0]
            weight = module.weight + 1 if type(module).__name__ == "UnitOffsetRMSNorm" else module.weight
            bias = getattr(module, "bias", None)
            return x * scale * weight + (0 if bias is None else bias)

        return hook

    def logit(**replacements):
        all_outputs = outputs | replacements
        output_hooks = [(model.get_submodule(path), lambda *_, x=all_outputs[path]: x) for path in branches]
        with forward_hooks(*((norms[path], frozen(path)) for path in norms), *output_hooks):
            return float(run_logits(model, model_args)[0, -1, token])

    total_logit, effects = logit(), {}
    for path in branches:
        if path not in layers:
            effects[path, None] = total_logit - logit(**{path: torch.zeros_like(outputs[path])})
            continue
        layer = model.get_submodule(path)
        D = layer.d_head
        for head in range(layer.n_heads):
            part = slice(head * D, (head + 1) * D)
            head_output = inputs[f"{path}.o_proj"][..., part] @ layer.o_proj.weight[:, part].T
            effects[path, head] = total_logit - logit(**{path: outputs[path] - head_output})
        bias = layer.o_proj.bias
        if bias is not None:
            effects[f"{path} (output bias)", None] = total_logit - logit(**{path: outputs[path] - bias})
    return effects


@pytest.mark.parametrize("kind", KINDS)
def test_attribute_contribution_equals_ablation_effect(kind):
    model, model_args = decoder(**KINDS[kind]), ids()
    attribution = analysis.attribute(model, model_args, analysis.LogitMetric(token=5))
    values = {(part.path, part.head): part.value for part in attribution.parts}
    effects = ablate_with_hooks(model, model_args, 5)
    assert set(effects) <= set(values)
    for key, expected in effects.items():
        assert values[key] == pytest.approx(expected, abs=rounding(attribution.logit, *values.values())), key
    # The remaining terms are constants: the position table, and biases of norms in the residual stream.
    other_kinds = {part.path: part.kind for part in attribution.parts if (part.path, part.head) not in effects}
    assert set(other_kinds.values()) <= {"embedding", "bias"}
    assert all("norm" in path or "positions" in path for path in other_kinds)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_attribute_transformers_model_equals_projection_formula(name):
    model, model_args, _ = CASES[name]()
    if name == "gpt2":
        body, norm, paths = model.transformer, model.transformer.ln_f, ["transformer.wte", "transformer.wpe"]
        layers, ending, last = "transformer.h", ("attn", "c_proj"), "transformer.ln_f"
        blocks, matrix = body.h, lambda projection: projection.weight
    else:
        body, norm, paths = model.model, model.model.norm, ["model.embed_tokens"]
        layers, ending, last = "model.layers", ("self_attn", "o_proj"), "model.norm"
        blocks, matrix = body.layers, lambda projection: projection.weight.T
    mlps = [f"{layers}.{i}.mlp" for i in range(len(blocks))]
    attentions = [f"{layers}.{i}.{ending[0]}" for i in range(len(blocks))]
    inputs, outputs, logits = record_with_hooks(
        model, [*paths, *mlps, last, *(f"{p}.{ending[1]}" for p in attentions)], model_args
    )
    token, x = 4, inputs[last][0, -1]
    centred = x - x.mean() if name == "gpt2" else x
    scale = (centred.square().mean() + (norm.eps if name == "gpt2" else norm.variance_epsilon)).rsqrt()

    def contribution(output):
        output = output.reshape(-1, output.shape[-1])[-1]
        output = output - output.mean() if name == "gpt2" else output
        return float(((output * scale * norm.weight) @ model.lm_head.weight[token]).detach())

    expected_values = {(path, None): contribution(outputs[path]) for path in (*paths, *mlps)}
    for path in attentions:
        projection = model.get_submodule(f"{path}.{ending[1]}")
        for head in range(6):
            part = slice(4 * head, 4 * head + 4)
            expected_values[path, head] = contribution(
                inputs[f"{path}.{ending[1]}"][..., part] @ matrix(projection)[part]
            )
        if name == "gpt2":
            expected_values[f"{path} (output bias)", None] = contribution(projection.bias)
    if name == "gpt2":
        expected_values["transformer.ln_f.bias", None] = float((norm.bias @ model.lm_head.weight[token]).detach())
    attribution = analysis.attribute(model, model_args, analysis.LogitMetric(token=token))
    values = {(part.path, part.head): part.value for part in attribution.parts}
    assert values.keys() == expected_values.keys()
    for key, expected in expected_values.items():
        assert values[key] == pytest.approx(expected, abs=rounding(*expected_values.values(), name=name)), key
    assert sum(expected_values.values()) == pytest.approx(
        float(logits[0, -1, token]), abs=rounding(*expected_values.values(), name=name)
    )
    rows, head_values = attribution.heads()
    assert rows == tuple(attentions)
    assert head_values.tolist() == [[values[path, head] for head in range(6)] for path in rows]


def test_attribution_text_html_and_json():
    attribution = analysis.attribute(decoder(), ids(), analysis.LogitMetric(token=2))
    document = json.loads(json.dumps(attribution.to_dict()))
    assert document["metric"] == {"token": 2, "baseline": None, "position": -1}
    assert sum(part["value"] for part in document["parts"]) + document["residual"] == pytest.approx(document["logit"])
    assert [p.name for p in attribution.parts if p.head == 3] == [f"{i}.3 attention" for i in range(2)]
    assert "Largest contributions to the logit" in str(attribution)
    assert attribution.largest[0].name in str(attribution)
    assert f"<th scope=row>{attribution.largest[0].name}</th>" in attribution._repr_html_()
    assert [abs(p.value) for p in attribution.largest] == sorted(
        (abs(p.value) for p in attribution.parts), reverse=True
    )


def test_attribute_eager_attention_equals_sdpa():
    """Attention that is written out is recorded, and split into heads."""
    model, x = gpt2(), ids()
    expected = analysis.attribute(model, x)
    model.set_attn_implementation("eager")
    attribution = analysis.attribute(model, x)
    assert [part.name for part in attribution.parts] == [part.name for part in expected.parts]
    for part, expected_part in zip(attribution.parts, expected.parts, strict=True):
        assert part.value == pytest.approx(expected_part.value, abs=attribution.tolerance + expected.tolerance)
    assert attribution.heads()[0] == expected.heads()[0]


class EinsumModel(nn.Module):
    """A model whose attention is not recognized."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(24, 24)

        def forward(self, x):
            weights = torch.einsum("btd,bsd->bts", x, x).tanh().exp()
            return x + self.out(torch.einsum("bts,bsd->btd", weights / weights.sum(-1, keepdim=True), x))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, 24)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(24, V, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_attribute_unrecorded_attention_yields_one_term_per_layer():
    attribution = analysis.attribute(randomize(EinsumModel()), ids())
    assert {part.kind for part in attribution.parts} == {"embedding", "layer"}
    with pytest.raises(ConfigError, match="the heads of this model could not be separated"):
        attribution.heads()


class InPlaceSumModel(nn.Module):
    """A residual stream with in-place operations and a final module. Its torch layers run as one operator unless they
    have hooks, so a traced run is equal only up to rounding."""

    def __init__(self, last):
        super().__init__()
        self.embedding = nn.Embedding(V, 24)
        make = lambda first: nn.TransformerEncoderLayer(24, 6, 37, batch_first=True, norm_first=first)  # noqa: E731
        self.layers = nn.ModuleList(make(i % 2 == 0) for i in range(2))
        self.norm, self.head, self.last = nn.LayerNorm(24), nn.Linear(24, V), last

    def forward(self, model_args):
        x = self.embedding(model_args)
        for layer in self.layers:
            x = layer(x)
        total = torch.zeros_like(x)
        total += x
        total *= 2
        total[:, 0] = 0
        return self.last(self.head(self.norm(total + x)))


def test_attribute_in_place_sums_of_torch_layers_sum_to_logit():
    model = randomize(InPlaceSumModel(nn.Identity()))
    x = ids()
    attribution = analysis.attribute(model, x)
    assert attribution.logit == pytest.approx(float(run_logits(model, x)[0, -1].max()), abs=rounding(attribution.logit))
    assert abs(attribution.residual) <= rounding(attribution.logit)


def test_attribute_nonlinear_head_raises_and_logit_lens_works():
    model, x = randomize(InPlaceSumModel(nn.Tanh())), ids()
    with pytest.raises(ConfigError, match="not linear between its blocks and its logits"):
        analysis.attribute(model, x)
    torch.testing.assert_close(analysis.logit_lens(model, x).logits[-1], run_logits(model, x))
