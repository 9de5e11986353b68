"""Models with position biases and soft caps train and prefill without tensors of all pairs of tokens.

The profiler of torch reports the memory that each operation allocates, also inside of kernels."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from clearhead.attention import SoftCapped
from clearhead.generation import generate
from clearhead.masks import causal, window
from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from clearhead.nn.positions import ALiBi, RelativeBias, Rotary

T = 1536
COMMON = {"vocab_size": 13, "d_model": 32, "n_heads": 4, "d_ff": 64, "max_len": T, "dropout": 0.0}
SIZES = {**COMMON, "n_layers": 1}
MODELS = {
    "T5": lambda: EncoderDecoderConfig(**COMMON, n_encoder_layers=1, n_decoder_layers=1, positions=RelativeBias()),
    "T5 with a table per layer": lambda: EncoderConfig(**SIZES, positions=RelativeBias(), positions_per_layer=True),
    "ALiBi": lambda: DecoderConfig(**SIZES, positions=ALiBi()),
    "Gemma 2": lambda: DecoderConfig(
        **SIZES,
        positions=Rotary(),
        n_kv_heads=2,
        scores=SoftCapped(50.0),
        mask=causal(),
        layer_masks=(window(512, 0),),
    ),
}


def largest_allocation(function):
    """Return the largest memory that an operation allocates, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    return max(event.self_cpu_memory_usage for event in profiler.events())


def inputs_of(model):
    ids = torch.randint(0, 13, (1, T), generator=torch.Generator().manual_seed(0))
    return (ids, ids) if hasattr(model, "encoder") else (ids,)


@pytest.mark.measured
@pytest.mark.parametrize("name", MODELS)
def test_training_allocates_no_tensor_of_all_pairs(name):
    model = MODELS[name]().build()
    largest = largest_allocation(lambda: model(*inputs_of(model)).square().mean().backward())
    assert T * model.config.d_ff * 4 <= largest < T * T * 4
    assert all(p.grad is not None for path, p in model.named_parameters() if "positions" in path)


@pytest.mark.measured
@pytest.mark.parametrize("name", ["T5", "ALiBi", "Gemma 2"])
def test_prefill_allocates_no_tensor_of_all_pairs(name):
    model = MODELS[name]().build().eval()
    prompt = inputs_of(model)[0][:, : T - 8]
    start = {"decoder_start_ids": 1} if hasattr(model, "encoder") else {}
    assert largest_allocation(lambda: generate(model, prompt, max_new_tokens=2, **start)) < T * T * 4


def test_dense_bias_of_all_pairs_is_detected():
    bias = ALiBi().build(4)(T, T)
    assert largest_allocation(bias.dense) >= 4 * T * T * 4
