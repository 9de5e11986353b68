"""Saved activations against autograd's saved tensors, and the peak against every storage of a real step."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from clearhead.analysis.cost import cost
from clearhead.analysis.cost.measure import measure
from clearhead.analysis.cost.predict import set_impl
from clearhead.analysis.inputs.example import example
from clearhead.masks import causal, window
from clearhead.models import DecoderConfig
from clearhead.models.baselines.recurrent import LSTM
from clearhead.nn import MultiHeadAttention
from clearhead.nn.positions import RelativeBias
from tests.analysis.cost.subjects import BASELINES, SUBJECTS, TRANSFORMERS, token_counts

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "feed_forward_dropout": 0.1}


def saved_bytes(model, sample) -> int:
    """Return the bytes of all storages that autograd saves, without parameters and inputs."""
    excluded = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *sample.tensors)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            # A reference to the tensor prevents reuse of its address.
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = sample.loss(model)
    assert loss.requires_grad
    return sum(n for n, _ in saved.values())


def predicted_and_saved(config, *, impl="auto", dtype=torch.float32, batch=3):
    tokens = token_counts(config, 13, 11)
    predicted = cost(config, tokens=tokens, batch=batch, training=True, impl=impl, dtype=dtype, device="cpu")
    model = set_impl(config.build(), impl).to(dtype)
    sample = example(model, "it", tokens=tokens, batch=batch, dtype=dtype)
    return predicted.memory.activations.value, saved_bytes(model, sample)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_activations_equal_autograd_saved_tensors(name, impl):
    predicted, saved = predicted_and_saved(TRANSFORMERS[name], impl=impl)
    assert predicted == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", ["encoder", "decoder", "encoder-decoder", "vision", "decoder, untied, no bias, rms"])
def test_activations_with_dropout_equal_saved_tensors(name, impl):
    predicted, saved = predicted_and_saved(TRANSFORMERS[name].replace(**DROPOUT), impl=impl)
    assert predicted == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", ["decoder", "vision", "decoder, untied, no bias, rms"])
def test_activations_in_half_precision_equal_saved_tensors(name, impl):
    predicted, saved = predicted_and_saved(TRANSFORMERS[name], impl=impl, dtype=torch.bfloat16)
    assert predicted == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", ["encoder", "encoder, window", "decoder", "decoder, sparse", "encoder-decoder"])
def test_activations_with_learned_bias_equal_saved_tensors(name, impl):
    """Use one sequence: the index of the bias is saved once, for any batch."""
    predicted, saved = predicted_and_saved(TRANSFORMERS[name].replace(positions=RelativeBias()), impl=impl, batch=1)
    assert predicted == saved


@pytest.mark.parametrize("name", [n for n in BASELINES if "lstm" not in n and "seq2seq" not in n])
def test_activations_of_baselines_equal_saved_tensors(name):
    predicted, saved = predicted_and_saved(BASELINES[name], batch=5)
    assert predicted == pytest.approx(saved, rel=0.05 if "rnn" in name or "gru" in name else 0.01)


@pytest.mark.parametrize("mask", [None, causal(), window(3, 1)], ids=str)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_activations_of_layer_equal_saved_tensors(mask, impl):
    layer = MultiHeadAttention(35, 5, impl=impl)
    predicted = cost(layer, tokens=17, batch=2, training=True, mask=mask, impl=impl, device="cpu")
    sample = example(layer, "it", tokens=17, batch=2, mask=mask)
    assert predicted.memory.activations.value == saved_bytes(layer, sample)


def test_activations_of_plan_equal_saved_tensors():
    layer = MultiHeadAttention(35, 5, impl="sparse")
    mask = causal() & window(3, 0)
    predicted = cost(layer, tokens=17, batch=2, training=True, mask=mask, impl="sparse", device="cpu")
    assert predicted.memory.activations.value == saved_bytes(layer, example(layer, "it", tokens=17, batch=2, mask=mask))


@pytest.mark.measured
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_peak_equals_measured_peak(name, training):
    config = TRANSFORMERS[name]
    tokens = token_counts(config, 37, 31)
    predicted = cost(config, tokens=tokens, batch=7, training=training, device="cpu").memory.peak.value
    measured = measure(config, tokens=tokens, batch=7, training=training, seconds=0.0).peak_bytes
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.measured
def test_peak_with_activation_checkpointing_equals_measured_peak():
    config = DecoderConfig(vocab_size=53, d_model=38, n_heads=2, n_layers=7)
    options = {"tokens": 31, "batch": 13, "training": True, "device": "cpu"}
    predicted = cost(config, **options, activation_checkpointing=True).memory.peak.value
    measured = measure(config, **options, activation_checkpointing=True, seconds=0.0).peak_bytes
    assert predicted == pytest.approx(measured, rel=0.02)
    assert measured < 0.5 * measure(config, **options, seconds=0.0).peak_bytes


def test_activations_of_lstm_are_a_lower_bound():
    """The CPU's fused LSTM allocates an additional workspace, so the prediction is a lower bound."""
    config = SUBJECTS["lstm, both ways"]
    assert config.cell == LSTM()
    predicted, saved = predicted_and_saved(config)
    assert predicted < saved
