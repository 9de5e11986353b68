"""Tests that the streaming CTC encoder equals the full forward pass for any chunk sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.masks import blocks, causal, full, prefix, window
from clearhead.models import CTCEncoderConfig, StreamingSpec, load_checkpoint, save_checkpoint
from clearhead.nn import KVCache, StackedFrames
from clearhead.nn.mel import Mel
from clearhead.nn.positions import ALiBi, NoPE, RelativeBias
from tests.support.rounding import assert_equal_up_to_rounding

MASKS = (
    causal(),
    causal() & window(5, 0),
    blocks(3) | causal(),
    (causal() | blocks(4)) & window(6, 3),
    blocks(3),
    causal() & (blocks(2) | window(3, 0)),
)


def tiny(mask=MASKS[1], **changes):
    sizes = {"d_model": 12, "n_heads": 3, "n_layers": 2, "n_symbols": 4, "mel": Mel(n_mels=5), "frame_stacking": 2}
    return CTCEncoderConfig(**(sizes | {"left_frames": 3, "mask": mask, "mean": -2.0, "std": 1.7} | changes))


@settings(max_examples=30)
@given(
    mask=st.sampled_from(MASKS),
    positions=st.sampled_from((ALiBi(), RelativeBias(n_buckets=8, max_distance=9), NoPE())),
    sizes=st.lists(st.integers(0, 4), max_size=9),
    n_remaining=st.integers(0, 9),
    context=st.sampled_from((0, 1, 5)),
)
def test_streamed_output_equals_output_of_whole_recording(mask, positions, sizes, n_remaining, context):
    model = tiny(mask, positions=positions, left_frames=context).build().double().eval()
    step = 2 * model.streaming.chunk
    pieces = [size * step for size in sizes] + [n_remaining]
    frames = torch.randn(2, sum(pieces), 5, dtype=torch.float64)
    with torch.no_grad():
        expected, cache = model(frames), KVCache()
        parts = [model(piece, cache=cache) for piece in frames.split(pieces, dim=1)]
    streamed = torch.cat(parts, 1)
    assert streamed.shape == expected.shape == (2, sum(pieces) // 2, 5)
    assert torch.allclose(streamed, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [MASKS[1], MASKS[3]])
def test_streaming_cache_is_bounded_by_the_window(mask):
    model, cache, cache_sizes = tiny(mask).build().eval(), KVCache(), []
    with torch.no_grad():
        for _ in range(25):
            model(torch.randn(1, 2 * model.streaming.chunk, 5), cache=cache)
            cache_sizes.append((cache.length, cache.n_bytes))
    assert cache_sizes[-1] == cache_sizes[10]
    assert cache.length <= model.streaming.left_context + model.streaming.chunk
    assert cache[0].length + cache[0].n_evicted == 25 * model.streaming.chunk


def test_batched_recordings_equal_single_recordings():
    for mask in (full(), MASKS[3]):
        model = tiny(mask).build().double().eval()
        frames = torch.randn(2, 26, 5, dtype=torch.float64)
        together = model(frames, torch.tensor([14, 26]))
        assert torch.allclose(together[0, :7], model(frames[:1, :14])[0], atol=1e-12)
        assert torch.allclose(together[1], model(frames[1:])[0], atol=1e-12)


def test_loaded_ctc_encoder_equals_saved_model(tmp_path):
    model = tiny(MASKS[3]).build().eval()
    save_checkpoint(model, tmp_path / "m")
    again, frames = load_checkpoint(tmp_path / "m"), torch.randn(1, 20, 5)
    assert again.config == model.config
    assert_equal_up_to_rounding(again(frames), model(frames))
    assert again.config.blank == 4
    assert again.config.frame_seconds == 0.02


@pytest.mark.parametrize(
    ("mask", "spec"),
    [
        (causal(), StreamingSpec(1, None)),
        (causal() & window(64, 0), StreamingSpec(1, 64)),
        ((causal() | blocks(16)) & window(64, 15), StreamingSpec(16, 64)),
        ((causal() | blocks(6)) & window(7, 9), StreamingSpec(6, 12)),
        (blocks(4) | blocks(6), StreamingSpec(12, None)),
    ],
)
def test_streaming_spec_of_mask_has_expected_chunk_and_context(mask, spec):
    assert StreamingSpec.of(mask) == spec


@pytest.mark.bad_input
@pytest.mark.parametrize("mask", [full(), window(3, 1), causal() | prefix(3), ~causal(), causal() | window(0, 9)])
def test_mask_with_unbounded_lookahead_raises_on_a_stream(mask):
    with pytest.raises(ConfigError, match="cannot be used on a stream"):
        tiny(mask).build()(torch.randn(1, 6, 5), cache=KVCache())


@pytest.mark.bad_input
def test_ctc_encoder_with_invalid_inputs_raises():
    model, cache = tiny(MASKS[3]).build().eval(), KVCache()
    with pytest.raises(ShapeError, match="leave lengths out"):
        model(torch.randn(1, 8, 5), torch.tensor([8]), cache=cache)
    model(torch.randn(1, 6, 5), cache=cache)
    with pytest.raises(ShapeError, match=r"inside a block of 4 encoder frames; expected a multiple of 8 frames"):
        model(torch.randn(1, 8, 5), cache=cache)
    with pytest.raises(ShapeError, match=r"expected \(B, T, 5\)"):
        model(torch.randn(1, 8, 6))
    with pytest.raises(DtypeError, match="as returned by `Mel`"):
        StackedFrames(5, 2, 12)(torch.zeros(1, 8, 5, dtype=torch.int64))
    with pytest.raises(ShapeError, match="cannot evict 7 of the 3 tokens"):
        cache.evict_oldest(7)


def test_stacked_frames_equal_a_strided_convolution():
    embedding = StackedFrames(5, 3, 7, left_frames=4).double()
    frames = torch.randn(2, 17, 5, dtype=torch.float64)
    kernel = embedding.projection.weight.unflatten(1, (5, 7))  # (M, F, earlier + stacked)
    padded = torch.nn.functional.pad(frames.mT, (4, 0))[..., : 4 + 15]
    expected = torch.nn.functional.conv1d(padded, kernel, embedding.projection.bias, stride=3).mT
    assert torch.allclose(embedding(frames), expected)
    assert embedding(frames[:, :2]).shape == (2, 0, 7)


def test_rotary_positions_continue_after_cache_eviction():
    """Rotary positions go on counting where the oldest tokens were let go."""
    from clearhead.nn import MultiHeadAttention
    from clearhead.nn.positions import Rotary

    layer = MultiHeadAttention(12, 3, rotary=Rotary()).double().eval()
    x, mask = torch.randn(1, 11, 12, dtype=torch.float64), causal() & window(3, 0)
    with torch.no_grad():
        expected, cache, parts = layer(x, mask=mask), KVCache(), []
        for piece in x.split(2, dim=1):
            parts.append(layer(piece, mask=mask, cache=cache))
            cache.evict_oldest(max(0, cache.length - 3))
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-12)
