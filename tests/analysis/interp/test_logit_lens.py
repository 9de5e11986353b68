"""The logit lens, compared with the model's own norm and unembedding."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from torch import nn

from clearhead import analysis
from clearhead.analysis.interp.residual_stream import record_residual_stream
from tests.analysis.interp.subjects import (
    CASES,
    T,
    V,
    change_middle_token,
    decoder,
    ids,
    randomize,
    record_with_hooks,
    run_logits,
)


def test_logit_lens_last_layer_equals_model_output(case):
    _, model, model_args, _ = case
    logits = run_logits(model, model_args)
    lens = analysis.logit_lens(model, model_args)
    assert torch.equal(lens.logits[-1], logits)  # to the bit
    assert torch.equal(run_logits(model, model_args), logits)  # and no hook remains
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())
    assert lens.ranks()[-1].eq(0).all()
    assert len(lens.layers) == 3


def test_logit_lens_equals_norm_and_unembedding():
    model, model_args = decoder(), ids()
    paths = [f"blocks.{i}" for i in range(2)]
    inputs, outputs, _ = record_with_hooks(model, paths, model_args)
    lens = analysis.logit_lens(model, model_args, positions=[-1, 2])
    assert lens.layers == ("into blocks.0", *paths)
    assert lens.positions == (T - 1, 2)
    for layer, x in enumerate([inputs["blocks.0"], *(outputs[path] for path in paths)]):
        with torch.no_grad():
            expected = model.embedding.logits(model.norm(x))[:, [-1, 2]]
        torch.testing.assert_close(lens.logits[layer], expected, rtol=0, atol=0)
    tokens, probabilities = lens.top(3)
    assert tokens.shape == probabilities.shape == (3, 1, 2, 3)
    assert torch.equal(tokens[..., 0], lens.logits.argmax(-1))
    document = json.loads(json.dumps(lens.to_dict(lambda token: f"t{token}", k=2)))
    assert document["layers"][2]["predictions"][1][0]["token"] == f"t{int(tokens[2, 0, 1, 0])}"
    assert "layer 1" in str(lens)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logit_lens_transformers_model_equals_norm_and_unembedding(name):
    model, model_args, _ = CASES[name]()
    body = model.transformer if name == "gpt2" else model.model
    layers, norm = ("transformer.h", body.ln_f) if name == "gpt2" else ("model.layers", body.norm)
    count = len(model.get_submodule(layers))
    _, outputs, _ = record_with_hooks(model, [f"{layers}.{i}" for i in range(count)], model_args)
    lens = analysis.logit_lens(model, model_args)
    for i in range(count):
        with torch.no_grad():
            expected = model.lm_head(norm(outputs[f"{layers}.{i}"]))
        assert torch.equal(lens.logits[i + 1], expected)


class InPlaceBlock(nn.Module):
    """A pre-norm block that adds to its input in place, or not."""

    def __init__(self, in_place):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)
        self.in_place = in_place

    def forward(self, x):
        y = self.layer(self.norm(x)).tanh()
        if not self.in_place:
            return x + y
        x += y
        return x


class InPlaceModel(nn.Module):
    """A model that changes the stream in place inside its blocks and after the last one, or not."""

    def __init__(self, in_place):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(V, 6), nn.LayerNorm(6), nn.Linear(6, V)
        self.blocks = nn.ModuleList(InPlaceBlock(in_place) for _ in range(3))
        self.in_place = in_place

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        scale = torch.arange(1.0, 7.0, dtype=x.dtype)
        if not self.in_place:
            return self.head(self.norm(x * scale))
        x *= scale
        return self.head(self.norm(x))


@torch.no_grad()
def test_logit_lens_of_stream_changed_in_place_equals_that_of_copies():
    changed = randomize(InPlaceModel(in_place=True))
    copied = InPlaceModel(in_place=False).double().eval()
    copied.load_state_dict(changed.state_dict())
    x = ids()
    lens, expected = (analysis.logit_lens(model, x) for model in (changed, copied))
    assert lens.layers == expected.layers
    torch.testing.assert_close(lens.logits, expected.logits, rtol=0, atol=0)
    assert torch.equal(lens.logits[-1], changed(x))


def test_logit_lens_does_not_affect_other_threads():
    """While a lens replaces blocks in one thread, other threads run the original blocks."""
    model, model_args = decoder(), ids()
    expected, thread_logits = run_logits(model, model_args), []
    real = model.norm.forward

    def norm(x):
        assert not any("forward" in vars(block) for block in model.blocks)
        if threading.current_thread() is threading.main_thread() and not thread_logits:
            other = threading.Thread(
                target=lambda: thread_logits.append(run_logits(model, change_middle_token(model_args)))
            )
            other.start()
            other.join()
        return real(x)

    model.norm.forward = norm
    analysis.logit_lens(model, model_args)
    del model.norm.forward
    assert torch.equal(thread_logits[0], run_logits(model, change_middle_token(model_args)))
    assert torch.equal(run_logits(model, model_args), expected)


def test_logit_lens_works_in_threads_and_inference_mode():
    model, inputs = decoder(), [ids() for _ in range(4)]
    expected = [analysis.logit_lens(model, x).logits for x in inputs]
    logits = {}
    threads = [
        threading.Thread(target=lambda i=i: logits.update({i: analysis.logit_lens(model, inputs[i]).logits}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(logits[i], expected[i]) for i in range(4))
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.inference_mode():
        assert analysis.attribute(model, inputs[0]) == analysis.attribute(model, inputs[0])
        assert torch.equal(analysis.logit_lens(model, inputs[0]).logits, expected[0])


def test_record_residual_stream_keeps_implementations():
    model, model_args = decoder(), ids()
    with torch.no_grad(), analysis.trace(model) as untraced:
        model(model_args)
    with analysis.trace(model) as t:
        stream = record_residual_stream(model, model_args)
    assert t.report() == untraced.report()
    assert torch.equal(stream.logits, run_logits(model, model_args))
