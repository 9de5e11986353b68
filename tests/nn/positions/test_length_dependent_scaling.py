"""Rotary scalings that depend on the length of the sequence, compared with the functions of transformers."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.errors import ShapeError
from clearhead.generation import generate
from clearhead.models import DecoderConfig
from clearhead.nn import KVCache
from clearhead.nn.positions import DynamicNTKScaling, LongRopeScaling, Rotary

D, LIMIT = 10, 7
LONG_ROPE = LongRopeScaling((1.0, 1.1, 1.2, 1.3, 1.4), (2.0, 3.0, 5.0, 7.0, 11.0), LIMIT, math.sqrt(2))
SCALINGS = {"longrope": LONG_ROPE, "dynamic": DynamicNTKScaling(factor=3.0, original_max_len=LIMIT)}


def reference_angles(kind, length):
    """Return the frequencies and the factor of cos and sin that transformers computes."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": 500.0, "factor": 3.0}
    if kind == "longrope":
        parameters |= {
            "short_factor": list(LONG_ROPE.short),
            "long_factor": list(LONG_ROPE.long),
            "original_max_position_embeddings": LIMIT,
            "attention_factor": LONG_ROPE.attention_factor,
        }
    config = transformers.LlamaConfig(
        hidden_size=2 * D, num_attention_heads=2, max_position_embeddings=LIMIT, rope_parameters=parameters
    )
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("length", [1, LIMIT, LIMIT + 1, 23])
def test_rotate_equals_transformers_at_each_length(kind, length):
    rotary = Rotary(base=500.0, scaling=SCALINGS[kind])
    frequencies, factor = reference_angles(kind, length)
    angles = torch.arange(length)[:, None] * frequencies.double()
    unit = torch.cat((torch.ones(D // 2), torch.zeros(D // 2))).double().expand(length, D)
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
    torch.testing.assert_close(rotary.rotate(unit, torch.arange(length)), expected, rtol=0, atol=1e-5)


@pytest.fixture(params=SCALINGS)
def model(request):
    torch.manual_seed(3)
    positions = Rotary(base=500.0, scaling=SCALINGS[request.param])
    sizes = {"vocab_size": 13, "d_model": 2 * D, "n_heads": 2, "n_layers": 1, "max_len": LIMIT}
    return DecoderConfig(**sizes, positions=positions).build().eval().double()


def test_cache_across_the_original_length_raises(model):
    cache = KVCache()
    model(torch.arange(LIMIT)[None], cache=cache)
    with pytest.raises(ShapeError, match="compute the longer sequence without a cache"):
        model(torch.tensor([[1]]), cache=cache)
    assert cache.length == LIMIT


def test_generation_across_the_original_length_equals_uncached_loop(model):
    prompts = [torch.arange(LIMIT - 2), torch.arange(LIMIT + 2)]
    generated = generate(model, prompts, max_new_tokens=5)
    for row, prompt in enumerate(prompts):
        ids = prompt[None]
        for _ in range(5):
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
        assert generated.sequence(row).tolist() == ids[0, len(prompt) :].tolist()
