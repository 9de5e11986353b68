"""Decoding with a cache gives what decoding without one gives: one by one, in chunks, after reordering
and truncating."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clearhead.masks import causal, forbid, padding, window
from clearhead.models import DecoderConfig
from clearhead.nn import KVCache
from clearhead.nn.positions import LearnedPositions
from tests.models.conftest import SIZES

# A model is a function-scoped fixture and is not changed by an example.
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_ids(*shape, vocab=29, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def stepwise(call, ids, sizes, cache):
    """The logits of `ids` given in chunks of these sizes (the last chunk takes the rest)."""
    parts, start = [], 0
    for size in [*sizes, ids.shape[1]]:
        chunk = ids[:, start : start + size]
        if chunk.shape[1]:
            parts.append(call(chunk, cache))
        start += size
    return torch.cat(parts, 1)


def decode(decoder, dtype=torch.float64):
    return lambda ids, cache: decoder(ids, cache=cache)


@pytest.mark.parametrize("gradients", [True, False], ids=["with gradients", "without"])
def test_cached_decoding_by_token_equals_full_forward(decoder, gradients, assert_close):
    ids = random_ids(3, 11)
    with torch.set_grad_enabled(gradients):
        cache = KVCache(capacity=3)  # grows while it runs
        assert_close(stepwise(decode(decoder), ids, [1] * 11, cache), decoder(ids))
    assert cache.length == 11


def test_cached_decoding_in_float32_equals_full_forward(decoder, assert_close):
    ids = random_ids(3, 11)
    decoder = decoder.float()
    with torch.no_grad():
        assert_close(stepwise(decode(decoder), ids, [1] * 11, KVCache()), decoder(ids))


@FEW
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    keep=st.integers(0, 13),
    seed=st.integers(0, 99),
)
def test_cached_decoding_in_chunks_and_after_crop_equals_full_forward(decoder, assert_close, sizes, keep, seed):
    ids, other = random_ids(2, 13, seed=seed), random_ids(2, 5, seed=seed + 1)
    with torch.no_grad():
        cache = KVCache(capacity=2)
        assert_close(stepwise(decode(decoder), ids, sizes, cache), decoder(ids))
        cache.crop(keep)
        assert cache.length == keep
        again = stepwise(decode(decoder), other, [2], cache)
        assert_close(again, decoder(torch.cat((ids[:, :keep], other), 1))[:, keep:])


@FEW
@given(rows=st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_cached_decoding_after_reorder_equals_full_forward(decoder, assert_close, rows):
    """Beams: rows are dropped, repeated and swapped; each row continues with its own history."""
    ids, order = random_ids(3, 7), torch.tensor(rows)
    new = random_ids(len(rows), 2, seed=2)
    with torch.no_grad():
        cache = KVCache()
        decoder(ids, cache=cache)
        cache.reorder(order)
        got = decoder(new, cache=cache)
        assert_close(got, decoder(torch.cat((ids[order], new), 1))[:, 7:])


def test_encoder_decoder_cached_decoding_equals_full_forward(encoder_decoder, assert_close):
    source, target = random_ids(3, 7), random_ids(3, 5, seed=1)
    hidden = padding(torch.tensor([7, 2, 5]))
    expected = encoder_decoder(source, target, source_mask=hidden)
    memory = encoder_decoder.encode(source, mask=hidden)
    for sizes in ([1] * 5, [2, 2], [4]):
        cache = KVCache(capacity=2)
        call = lambda ids, cache: encoder_decoder.decode(ids, memory, memory_mask=hidden, cache=cache)  # noqa: E731
        assert_close(stepwise(call, target, sizes, cache), expected)
        assert cache.length == 5


def test_encoder_decoder_decoding_after_reorder_and_crop_equals_full_forward(encoder_decoder, assert_close):
    source, target, new = random_ids(3, 7), random_ids(3, 5, seed=1), random_ids(4, 2, seed=2)
    order = torch.tensor([2, 0, 0, 1])
    lengths = torch.tensor([7, 2, 5])
    with torch.no_grad():
        memory = encoder_decoder.encode(source, mask=padding(lengths))
        cache = KVCache()
        encoder_decoder.decode(target, memory, memory_mask=padding(lengths), cache=cache)
        cache.reorder(order)
        cache.crop(3)
        hidden = padding(lengths[order])
        got = encoder_decoder.decode(new, memory[order], memory_mask=hidden, cache=cache)
        full_output = torch.cat((target[order, :3], new), 1)
        assert_close(got, encoder_decoder(source[order], full_output, source_mask=hidden)[:, 3:])


def test_cached_decoding_projects_memory_once(encoder_decoder):
    source, target = random_ids(2, 7), random_ids(2, 5, seed=1)
    calls = []
    for layer in encoder_decoder.decoder.blocks:
        layer.cross_attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        memory = encoder_decoder.encode(source)
        cache = KVCache()
        for i in range(5):
            encoder_decoder.decode(target[:, i : i + 1], memory, cache=cache)
    assert len(calls) == len(encoder_decoder.decoder.blocks)


def test_gradients_with_cache_equal_gradients_of_full_forward(build, assert_close):
    """Training in chunks (a long text, a piece at a time) has the gradients of the whole."""
    model = build(DecoderConfig(**SIZES, n_layers=2, positions=LearnedPositions(max_len=23)))
    ids = random_ids(2, 11)
    gradients = []
    for sizes in ([], [4, 1, 3]):
        model.zero_grad()
        stepwise(decode(model), ids, sizes, KVCache()).square().sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for full_output, chunked in zip(*gradients, strict=True):
        assert_close(chunked, full_output)


def test_cached_decoding_with_window_equals_full_forward(build, assert_close):
    model = build(DecoderConfig(**SIZES, n_layers=2, mask=causal() & window(3, 0)))
    ids = random_ids(2, 13)
    with torch.no_grad():
        assert_close(stepwise(decode(model), ids, [5, 1, 1], KVCache()), model(ids))


def test_cached_decoding_of_left_padded_prompts_equals_single_prompts(build, assert_close):
    """Prompts of different lengths in one batch, padded on the left, go on side by side as each does alone."""
    model = build(DecoderConfig(**SIZES, n_layers=2, positions=LearnedPositions(max_len=23)))
    ids, skip = random_ids(2, 11), torch.tensor([4, 0])
    real = torch.arange(11) >= skip[:, None]  # (B, S)
    positions = (torch.arange(11) - skip[:, None]).clamp(min=0)
    with torch.no_grad():
        cache = KVCache()
        parts = []
        for start, stop in [(0, 7), *((i, i + 1) for i in range(7, 11))]:
            hidden = forbid(~real[:, None, None, :stop].expand(2, 1, stop - start, stop))
            parts.append(model(ids[:, start:stop], mask=hidden, positions=positions[:, start:stop], cache=cache))
        out = torch.cat(parts, 1)
        assert_close(out[:1, 4:], model(ids[:1, 4:]))
        assert_close(out[1:], model(ids[1:]))


def test_interrupted_call_leaves_cache_unchanged(encoder_decoder, assert_close):
    """Ctrl-C between two blocks, or no memory left: the cache is as it was before the call."""
    source, target = random_ids(3, 7), random_ids(3, 5, seed=1)
    expected = encoder_decoder(source, target)
    memory = encoder_decoder.encode(source)

    def interrupt(*_):
        raise KeyboardInterrupt

    last = encoder_decoder.decoder.blocks[-1]
    for start in (0, 3):
        cache = KVCache()
        with torch.no_grad():
            if start:
                encoder_decoder.decode(target[:, :start], memory, cache=cache)
            hook = last.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                encoder_decoder.decode(target[:, start:], memory, cache=cache)
            hook.remove()
            assert cache.length == start
            got = encoder_decoder.decode(target[:, start:], memory, cache=cache)
        assert_close(got, expected[:, start:])


def test_cached_decoding_supports_changing_grad_modes(decoder, assert_close):
    ids = random_ids(2, 11)
    expected = decoder(ids)
    modes = (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad)
    cache, parts = KVCache(capacity=4), []
    for mode, chunk in zip(modes, ids.split([3, 1, 2, 1, 4], 1), strict=True):
        with mode():
            parts.append(decoder(chunk, cache=cache))
    assert_close(torch.cat([part.detach().clone() for part in parts], 1), expected)
