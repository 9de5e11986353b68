"""Interventions compared with equivalent forward hooks, and comparisons of traces."""

from __future__ import annotations

import copy
import json
import threading
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead import analysis
from clearhead.generation import Greedy, generate
from clearhead.models import Decoder, DecoderConfig, VisionTransformer, tiny_vision
from clearhead.nn import KVCache, attention

LAYER, BLOCK = "blocks.1.attention", "blocks.0"
PATTERNS = ("blocks.*.output", "blocks.*.attention.weights", "output")


def decoder():
    return Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=3, n_kv_heads=2)).double().eval()


def traced(model, ids, *edits, patterns=PATTERNS):
    with torch.no_grad(), analysis.trace(model, *patterns) as t:
        for path, edit in edits:
            t.intervene(path, edit)
        logits = model(ids)
    return logits, t


def hook_heads(layer, change):
    """Register a hook that changes the heads (B, T, H, D) at the input of the layer's `o_proj`."""

    def hook(projection, args):
        heads = args[0].unflatten(-1, (layer.n_heads, layer.d_head)).clone()
        change(heads)
        return (heads.flatten(-2),)

    return layer.o_proj.register_forward_pre_hook(hook)


def run_with_hook(model, ids, layer, change):
    handle = hook_heads(layer, change)
    try:
        with torch.no_grad():
            return model(ids)
    finally:
        handle.remove()


def test_zero_ablation_of_heads_and_positions_equals_hook():
    model, ids = decoder(), torch.randint(31, (3, 7))

    def zero(heads):
        for h in (4, 1):
            heads[:, [2, 6], h] = 0

    expected = run_with_hook(model, ids, model.blocks[1].attention, zero)
    logits, _ = traced(model, ids, (LAYER, analysis.ZeroAblation(heads=[4, 1], positions=[2, -1])))
    torch.testing.assert_close(logits, expected)
    assert (logits - traced(model, ids)[0]).abs().max() > 1e-6


def test_zero_ablation_of_all_heads_returns_output_bias():
    model, ids = decoder(), torch.randint(31, (3, 7))
    layer = model.blocks[1].attention
    nn.init.normal_(layer.o_proj.bias)
    _, t = traced(model, ids, (LAYER, analysis.ZeroAblation(heads=range(6))), patterns=(f"{LAYER}.output",))
    assert torch.equal(t.output(LAYER), layer.o_proj.bias.detach().expand(3, 7, 24))
    _, t = traced(model, ids, (LAYER, analysis.ZeroAblation()), patterns=(f"{LAYER}.output",))
    assert (t.output(LAYER) == 0).all()


def test_replace_activation_accepts_tensor_and_function():
    model, ids = decoder(), torch.randint(31, (3, 7))
    value = torch.randn(4, dtype=torch.float64)

    def change(heads):
        heads[:, :, 2] = value
        heads[:, 3:5, 5] = heads[:, 3:5, 5] * 2 + 1

    expected = run_with_hook(model, ids, model.blocks[1].attention, change)
    edits = (
        (LAYER, analysis.ReplaceActivation(value, heads=2)),
        (LAYER, analysis.ReplaceActivation(lambda x: x * 2 + 1, heads=[5], positions=slice(3, 5))),
    )
    torch.testing.assert_close(traced(model, ids, *edits)[0], expected)


def test_patch_activation_of_block_copies_other_run():
    """If all positions of a block are patched, the logits are those of the source run."""
    model = decoder()
    clean, other = torch.randint(31, (3, 7)), torch.randint(31, (3, 7))
    logits, source = traced(model, clean)
    patched, _ = traced(model, other, (BLOCK, analysis.PatchActivation(source)))
    torch.testing.assert_close(patched, logits)
    patched, t = traced(model, other, (BLOCK, analysis.PatchActivation(source, positions=[4])))
    assert torch.equal(t.output(BLOCK)[:, 4], source.output(BLOCK)[:, 4])
    other_output = traced(model, other)[1].output(BLOCK)
    assert torch.equal(t.output(BLOCK)[:, :4], other_output[:, :4])
    torch.testing.assert_close(patched[:, :4], model(other)[:, :4])  # positions before 4 do not attend to it


def test_patch_activation_of_heads_equals_hook():
    model = decoder()
    clean, other = torch.randint(31, (3, 7)), torch.randint(31, (3, 7))
    source = traced(model, clean)[1]

    def change(heads):
        heads[:, [1, 5], 3] = source.heads(LAYER)[:, 3][:, [1, 5]]

    expected = run_with_hook(model, other, model.blocks[1].attention, change)
    logits, t = traced(model, other, (LAYER, analysis.PatchActivation(source, heads=[3], positions=[1, 5])))
    torch.testing.assert_close(logits, expected)
    assert torch.equal(t.heads(LAYER)[:, 3, [1, 5]], source.heads(LAYER)[:, 3, [1, 5]])


def test_patch_activation_from_another_module():
    model = decoder()
    ids = torch.randint(31, (3, 7))
    source = traced(model, ids)[1]
    _, t = traced(model, ids, ("blocks.2", analysis.PatchActivation(source, path="blocks.0", positions=[0, 5])))
    assert torch.equal(t.output("blocks.2")[:, [0, 5]], source.output("blocks.0")[:, [0, 5]])
    assert torch.equal(t.output("blocks.2")[:, 1:5], source.output("blocks.2")[:, 1:5])


def test_compare_change_from_zero_is_infinite():
    model, ids = decoder(), torch.randint(31, (3, 7))
    zero, other = (
        analysis.ZeroAblation(positions=[2]),
        analysis.ReplaceActivation(torch.ones(24).double(), positions=[2]),
    )
    before = traced(model, ids, (BLOCK, zero), patterns=("blocks.0.output",))[1]
    after = traced(model, ids, (BLOCK, other), patterns=("blocks.0.output",))[1]
    (change,) = analysis.compare(before, after).outputs
    assert change.location == {"sequence": 0, "position": 2}
    assert change.to_dict()["largest"] is None


def test_mean_ablation_equals_hook():
    model = decoder()
    ids, corpus = torch.randint(31, (3, 7)), torch.randint(31, (11, 13))
    source = traced(model, corpus)[1]
    mean = source.heads(LAYER)[:, 2].mean((0, 1))

    def change(heads):
        heads[:, :, 2] = mean

    expected = run_with_hook(model, ids, model.blocks[1].attention, change)
    torch.testing.assert_close(traced(model, ids, (LAYER, analysis.MeanAblation(source, heads=2)))[0], expected)
    _, t = traced(model, ids, (BLOCK, analysis.MeanAblation(source)))
    torch.testing.assert_close(t.output(BLOCK), source.output(BLOCK).mean((0, 1)).expand(3, 7, 24))


def test_zero_ablation_blocks_gradient_of_heads():
    model, ids = decoder(), torch.randint(31, (3, 7))
    layer = model.blocks[1].attention
    with analysis.trace(model, "output") as t:
        t.intervene(LAYER, analysis.ZeroAblation(heads=[0, 1, 2]))
        model(ids).sum().backward()
    grad = layer.o_proj.weight.grad.unflatten(1, (6, 4))
    assert (grad[:, :3] == 0).all()
    assert grad[:, 3:].abs().max() > 0


def test_intervention_positions_are_absolute_with_cache():
    """Positions are indices in the whole sequence, independent of the step that computes them."""
    model, ids = decoder(), torch.randint(31, (2, 9))
    edit = analysis.ZeroAblation(heads=[1, 4], positions=[0, 3, 6, 8])
    expected = traced(model, ids, (LAYER, edit), (BLOCK, analysis.ZeroAblation(positions=slice(2, 7, 3))))[0]
    cache = KVCache()
    with torch.no_grad(), analysis.trace(model, "output") as t:
        t.intervene(LAYER, edit).intervene(BLOCK, analysis.ZeroAblation(positions=slice(2, 7, 3)))
        for piece in ids.split([4, 1, 1, 3], dim=1):
            model(piece, cache=cache)
    torch.testing.assert_close(t.output(), expected)


def test_patch_activation_with_cache_equals_one_pass():
    model = decoder()
    ids, other = torch.randint(31, (2, 9)), torch.randint(31, (2, 9))
    source = traced(model, other)[1]
    edits = (
        (LAYER, analysis.PatchActivation(source, heads=[2, 5], positions=[1, 5, 8])),
        (BLOCK, analysis.PatchActivation(source, positions=[6])),
    )
    expected = traced(model, ids, *edits)[0]
    cache = KVCache()
    with torch.no_grad(), analysis.trace(model, "output") as t:
        for path, edit in edits:
            t.intervene(path, edit)
        for piece in ids.split([4, 1, 1, 3], dim=1):
            model(piece, cache=cache)
    torch.testing.assert_close(t.output(), expected)


def test_intervention_changes_generated_ids_only_inside_trace():
    model, ids = decoder(), torch.randint(31, (2, 5))
    plain = generate(model, ids, strategy=Greedy(), max_new_tokens=5)
    with analysis.trace(model) as t:
        t.intervene("embedding", analysis.ReplaceActivation(lambda x: -x))
        edited = generate(model, ids, strategy=Greedy(), max_new_tokens=5)
    again = generate(model, ids, strategy=Greedy(), max_new_tokens=5)
    assert torch.equal(plain.ids, again.ids)
    assert not torch.equal(plain.ids, edited.ids)


@pytest.mark.parametrize("batch_first", [True, False])
def test_zero_ablation_of_torch_attention_heads(batch_first):
    layer = nn.MultiheadAttention(24, 4, batch_first=batch_first).double().eval()
    nn.init.normal_(layer.in_proj_bias)
    nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    box = nn.ModuleDict({"layer": layer})
    with torch.no_grad(), analysis.trace(box) as before:
        layer(x, x, x)
    heads = before.weights("layer") @ before.values("layer")
    heads[:, 2, 1:3] = 0
    expected = F.linear(heads.transpose(1, 2).flatten(-2), layer.out_proj.weight, layer.out_proj.bias)
    with torch.no_grad(), analysis.trace(box) as t:
        t.intervene("layer", analysis.ZeroAblation(heads=2, positions=[1, 2]))
        out, _ = layer(x, x, x)
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected)
    assert torch.equal(t.weights("layer"), before.weights("layer"))


def test_zero_ablation_of_torch_layer_blocks_gradient_of_heads():
    layer = nn.MultiheadAttention(24, 4, batch_first=True).double()
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    with analysis.trace(layer) as t:
        t.intervene("", analysis.ZeroAblation(heads=[1, 2]))
        layer(x, x, x)[0].square().sum().backward()
    by_head = layer.in_proj_weight.grad.unflatten(0, (3, 4, 6)).abs().amax((0, 2, 3))
    assert (by_head[[1, 2]] == 0).all()
    assert (by_head[[0, 3]] > 0).all()
    assert not t.heads("").requires_grad


def test_zero_ablation_of_sdpa_heads():
    class SDPAModule(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    model, x = SDPAModule(), torch.randn(3, 4, 5, 7)
    expected = model(x)
    expected[:, 2] = 0
    with analysis.trace(model, "output") as t:
        t.intervene("", analysis.ZeroAblation(heads=[2]))
        assert torch.equal(model(x), expected)


def test_compare_reports_changed_outputs_weights_and_logits():
    model, ids = decoder(), torch.randint(31, (3, 7))
    before_logits, before = traced(model, ids)
    after_logits, after = traced(model, ids, (LAYER, analysis.ZeroAblation(heads=[3], positions=[4])))
    comparison = analysis.compare(before, after)
    changes = {m.path: m for m in comparison.outputs}
    assert list(changes) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert changes["blocks.0"].largest == 0.0
    assert changes["blocks.0"].location == {}
    amount = changes["blocks.1"].amount
    assert (amount[:, [0, 1, 2, 3, 5, 6]] == 0).all()
    x, y = before.output("blocks.1"), after.output("blocks.1")
    torch.testing.assert_close(amount[:, 4], ((y - x).norm(dim=-1) / x.norm(dim=-1))[:, 4])
    assert changes["blocks.1"].location["position"] == 4
    weights = {m.path: m.amount for m in comparison.weights}
    assert (weights["blocks.1.attention"] == 0).all()
    shift = (after.weights("blocks.2.attention") - before.weights("blocks.2.attention")).abs().sum(-1) / 2
    torch.testing.assert_close(weights["blocks.2.attention"], shift)
    assert (weights["blocks.2.attention"][..., :4] == 0).all()
    assert weights["blocks.2.attention"][..., 4:].max() > 0
    kl = F.kl_div(after_logits.log_softmax(-1), before_logits.log_softmax(-1), log_target=True, reduction="none").sum(
        -1
    )
    torch.testing.assert_close(comparison.logits.kl, kl.clamp(min=0))
    assert torch.equal(comparison.logits.changed, before_logits.argmax(-1) != after_logits.argmax(-1))
    text = str(comparison)
    assert "blocks.0 output" in text
    assert "nowhere" in text
    assert "KL of the logits" in text
    assert json.loads(json.dumps(comparison.to_dict()))["outputs"][1]["largest"] == 0.0


def test_compare_classifier_runs():
    model = VisionTransformer(tiny_vision()).eval()
    images = torch.rand(3, model.config.n_channels, *model.config.image_size)
    _, before = traced(model, images, patterns=("output",))
    _, after = traced(model, images, ("blocks.0", analysis.ZeroAblation()), patterns=("output",))
    comparison = analysis.compare(before, after)
    assert comparison.logits.kl.shape == (3, 1)
    assert comparison.logits.kl.min() > 0


class Pair(NamedTuple):
    first: object
    second: object


@dataclass(frozen=True)
class OutputObject:
    """The output of a model as an object that is neither a mapping nor a sequence."""

    logits: torch.Tensor
    extra: int


class NestedOutput(nn.Module):
    """Returns its tensor inside a structure."""

    def __init__(self, pack):
        super().__init__()
        self.pack = pack

    def forward(self, x):
        return self.pack(2 * x)


@pytest.mark.parametrize(
    ("pack", "tensor"),
    [
        (lambda x: Pair(x, "more"), lambda out: out.first),
        (lambda x: Pair(None, x), lambda out: out.second),
        (lambda x: (None, x), lambda out: out[1]),
        (lambda x: [(), {"y": x}], lambda out: out[1]["y"]),
        (lambda x: {"loss": None, "parts": (x, 3)}, lambda out: out["parts"][0]),
        (lambda x: OutputObject(x, 3), lambda out: out.logits),
    ],
)
def test_intervention_edits_recorded_tensor_of_nested_output(pack, tensor):
    model = NestedOutput(pack)
    x = torch.randn(2, 3, 5)
    with analysis.trace(model, "output") as t:
        plain = model(x)
    assert torch.equal(t.output(), 2 * x)
    with analysis.trace(model, "output") as t:
        t.intervene("", analysis.ReplaceActivation(lambda y: y + 1))
        edited = model(x)
    assert type(edited) is type(plain)
    assert torch.equal(tensor(edited), 2 * x + 1)
    assert torch.equal(t.output(), 2 * x + 1)


def test_deepcopy_inside_trace_is_not_traced():
    model = decoder()
    ids = torch.randint(0, 31, (2, 5))
    plain = model(ids)
    with analysis.trace(model, *PATTERNS) as t:
        t.intervene(LAYER, analysis.ZeroAblation(heads=[1]))
        t.intervene(BLOCK, analysis.ZeroAblation(positions=[2]))
        model(ids)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(ids), plain)
    assert torch.equal(copied(ids), plain)
    assert t.runs == 1


def test_overlapping_traces_exit_in_any_order():
    model = decoder()
    ids = torch.randint(0, 31, (2, 5))
    plain, originals = model(ids), (attention.attend, F.scaled_dot_product_attention, KVCache.reorder)
    first, second = analysis.trace(model), analysis.trace(model)
    first.intervene(LAYER, analysis.ZeroAblation(heads=[1]))
    first.__enter__()
    second.__enter__()
    model(ids)
    first.__exit__(None, None, None)
    assert torch.equal(model(ids), plain)
    second.__exit__(None, None, None)
    assert torch.equal(model(ids), plain)
    assert (first.runs, second.runs) == (1, 2)
    assert originals == (attention.attend, F.scaled_dot_product_attention, KVCache.reorder)


def test_trace_ignores_other_threads():
    model, other = decoder(), decoder()
    ids = torch.randint(0, 31, (2, 5))
    plain, thread_outputs = other(ids), []

    def meanwhile(*_):
        thread = threading.Thread(target=lambda: thread_outputs.append(other(ids)))
        thread.start()
        thread.join()

    with analysis.trace(model, *PATTERNS) as t:
        t.intervene(LAYER, analysis.ZeroAblation(heads=[1]))
        model.get_submodule(LAYER).q_proj.register_forward_hook(meanwhile)
        model(ids)
    assert torch.equal(thread_outputs[0], plain)
    assert t.paths == [f"blocks.{i}.attention" for i in range(3)]
    assert t.runs == 1
