"""Cached steps are stitched into one run, which equals one pass over the whole sequence."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead import analysis
from clearhead.generation import BeamSearch, Greedy, generate
from clearhead.masks import allow, causal, every, padding, window
from clearhead.models import Decoder, DecoderConfig, EncoderDecoder, tiny_encoder_decoder
from clearhead.nn import KVCache, MultiHeadAttention
from clearhead.nn.positions import ALiBi, LearnedPositions, RelativeBias, Rotary, Sinusoidal

POSITIONS = [Sinusoidal(), LearnedPositions(max_len=41), Rotary(), ALiBi(), RelativeBias(bidirectional=False)]
ATTENTION, OUTPUT = "blocks.*.attention.weights", "blocks.*.output"


def decoder(**changes):
    sizes = {"vocab_size": 31, "d_model": 24, "n_heads": 6, "n_kv_heads": 2, "n_layers": 2, "max_len": 41}
    return Decoder(DecoderConfig(**{**sizes, **changes})).double().eval()


def run_at_once(model, *args, **kwargs):
    with torch.no_grad(), analysis.trace(model, "**.weights", "**.blocks.*.output") as t:
        model(*args, **kwargs)
    return t


def run_in_steps(model, ids, sizes, cache=None, **kwargs):
    cache = KVCache(capacity=3) if cache is None else cache
    with torch.no_grad(), analysis.trace(model, ATTENTION, OUTPUT, "output") as t:
        for piece in ids.split(sizes, dim=1):
            model(piece, cache=cache, **kwargs)
    return t


def assert_equal_traces(actual, expected):
    for path in expected.paths:
        assert actual.runs == expected.runs == 1
        torch.testing.assert_close(actual.weights(path), expected.weights(path))
        torch.testing.assert_close(actual.values(path), expected.values(path))
        torch.testing.assert_close(actual.heads(path), expected.heads(path))
        assert actual.difference(path) <= actual.tolerance(path)
    for (path, norm), (name, expected_norm) in zip(actual.norms(), expected.norms(), strict=True):
        assert path == name
        torch.testing.assert_close(norm, expected_norm)
        torch.testing.assert_close(actual.output(path), expected.output(path))


@pytest.mark.parametrize("positions", POSITIONS, ids=lambda p: type(p).__name__)
def test_cached_steps_equal_one_pass(positions):
    model = decoder(positions=positions)
    ids = torch.randint(31, (3, 11))
    assert_equal_traces(run_in_steps(model, ids, [5, 1, 2, 1, 1, 1]), run_at_once(model, ids))


@pytest.mark.parametrize("mask", [causal() & window(3, 0), causal() & (window(1, 0) | every(4))], ids=str)
def test_cached_steps_with_sparse_mask_and_padding_equal_one_pass(mask):
    model = decoder(mask=mask)
    ids = torch.randint(31, (2, 11))
    hidden = padding([11, 9], left_pad=[0, 2])
    assert_equal_traces(run_in_steps(model, ids, [4, 1, 6], mask=hidden), run_at_once(model, ids, mask=hidden))


def test_weights_of_stitched_run_select_rows_and_heads():
    model = decoder()
    ids = torch.randint(31, (3, 11))
    t = run_in_steps(model, ids, [5, 1, 2, 3])
    weights = t.weights("blocks.1.attention")
    rows = [10, 4, 5, 0, 7]
    torch.testing.assert_close(t.weights("blocks.1.attention", heads=[4, 0], rows=rows), weights[:, [4, 0]][:, :, rows])
    pieces = torch.cat([piece for _, piece in t.weight_blocks("blocks.1.attention", 3)], 1)
    torch.testing.assert_close(pieces, weights[:, 3])
    assert t.weights("blocks.1.attention", rows=[]).shape == (3, 6, 0, 11)


def test_trace_greedy_generation_equals_one_pass():
    model = decoder()
    prompt = torch.randint(31, (2, 5))
    with analysis.trace(model) as t:
        generated = generate(model, prompt, strategy=Greedy(), max_new_tokens=7)
    ids = torch.cat((prompt, torch.stack(list(generated.best))[:, :-1]), dim=1)  # the last id is not encoded
    expected = run_at_once(model, ids)
    for path in expected.paths:
        torch.testing.assert_close(t.weights(path), expected.weights(path))


def test_trace_uncached_generation_records_one_run_per_step():
    model = decoder()
    prompt = torch.randint(31, (1, 5))
    with analysis.trace(model) as cached:
        generate(model, prompt, strategy=Greedy(), max_new_tokens=4)
    with analysis.trace(model) as t:
        generate(model, prompt, strategy=Greedy(), max_new_tokens=4, use_cache=False)
    assert (t.runs, cached.runs) == (4, 1)
    assert t.weights("blocks.0.attention", run=0).shape == (1, 6, 5, 5)
    torch.testing.assert_close(t.weights("blocks.0.attention"), cached.weights("blocks.0.attention"))


def test_trace_encoder_decoder_generation_equals_one_pass():
    model = EncoderDecoder(tiny_encoder_decoder()).double().eval()
    source = [torch.randint(model.config.vocab_size, (n,)) for n in (7, 4)]
    with analysis.trace(model) as t:
        generated = generate(model, source, strategy=Greedy(), max_new_tokens=5, decoder_start_ids=1)
    target = torch.cat((torch.ones(2, 1, dtype=torch.long), torch.stack(list(generated.best))[:, :-1]), dim=1)
    padded = torch.nn.utils.rnn.pad_sequence(source, batch_first=True)
    expected = run_at_once(model, padded, target, source_mask=padding([7, 4]))
    assert t.runs == 1
    assert t.paths == expected.paths
    for path in t.paths:
        torch.testing.assert_close(t.weights(path), expected.weights(path))
        assert t.difference(path) <= t.tolerance(path)


def test_truncated_cache_continues_from_new_length():
    model = decoder()
    ids, other = torch.randint(31, (2, 9)), torch.randint(31, (2, 4))
    cache = KVCache()
    with torch.no_grad(), analysis.trace(model, ATTENTION, OUTPUT) as t:
        for piece in ids.split([5, 3, 1], dim=1):
            model(piece, cache=cache)
        cache.crop(6)
        for piece in other.split([1, 3], dim=1):
            model(piece, cache=cache)
    assert_equal_traces(t, run_at_once(model, torch.cat((ids[:, :6], other), dim=1)))


def test_interleaved_caches_are_separate_runs():
    model = decoder()
    texts = [torch.randint(31, (2, 7)), torch.randint(31, (3, 9))]
    caches = [KVCache(), KVCache()]
    with torch.no_grad(), analysis.trace(model, "blocks.1.attention") as t:
        for start, stop in ((0, 4), (4, 6), (6, None)):
            for ids, cache in zip(texts, caches, strict=True):
                model(ids[:, start:stop], cache=cache)
    assert t.runs == 2
    for run, ids in enumerate(texts):
        expected = run_at_once(model, ids).weights("blocks.1.attention")
        torch.testing.assert_close(t.weights("blocks.1.attention", run=run), expected)


def test_prefilled_cache_records_only_later_rows():
    model = decoder()
    ids, cache = torch.randint(31, (2, 9)), KVCache()
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
    t = run_in_steps(model, ids[:, 4:], [3, 2], cache)
    expected = run_at_once(model, ids).weights("blocks.1.attention", rows=slice(4, None))
    torch.testing.assert_close(t.weights("blocks.1.attention"), expected)


def test_unrecorded_steps_start_another_run():
    model = decoder()
    ids, cache = torch.randint(31, (2, 9)), KVCache()
    t = analysis.trace(model, "blocks.1.attention", "embedding.input")
    with torch.no_grad():
        with t:
            model(ids[:, :4], cache=cache)
            model(ids[:, 4:5], cache=cache)
        model(ids[:, 5:6], cache=cache)
        with t:
            model(ids[:, 6:], cache=cache)
    expected = run_at_once(model, ids).weights("blocks.1.attention")
    assert t.runs == 2
    torch.testing.assert_close(t.weights("blocks.1.attention", run=0), expected[:, :, :5, :5])
    torch.testing.assert_close(t.weights("blocks.1.attention", run=1), expected[:, :, 6:])
    assert torch.equal(t.input("embedding", run=0), ids[:, :5])  # ids are stitched, too


def test_allow_mask_rows_start_at_first_query_of_call():
    """The tensor of `allow` has the queries of one call as rows, at any position in the sequence."""
    layer = MultiHeadAttention(24, 6).double()
    x, cache = torch.randn(2, 7, 24).double(), KVCache()
    allowed = torch.rand(2, 1, 3, 7) < 0.6
    with torch.no_grad(), analysis.trace(layer) as t:
        layer(x[:, :4], mask=causal(), cache=cache)
        layer(x[:, 4:], mask=allow(allowed), cache=cache)
    weights = t.weights("", rows=[4, 5, 6])
    assert ((weights > 0) == allowed).all()
    assert t.difference("") <= t.tolerance("")


def test_difference_is_maximum_over_steps(monkeypatch):
    from clearhead.attention.sdpa import SDPAImplementation

    model, ids, real = decoder(), torch.randint(31, (2, 9)), SDPAImplementation.run
    monkeypatch.setattr(
        SDPAImplementation, "run", lambda self, call, plan: real(self, call, plan) * (1.001 if call.S == 7 else 1.0)
    )
    t = run_in_steps(model, ids, [5, 1, 1, 2])
    path = "blocks.0.attention"
    assert t.difference(path) == t.difference(path, rows=6) > 10 * t.tolerance(path)
    assert t.difference(path, rows=[0, 5, 8]) <= t.tolerance(path)


def test_cached_cross_attention_layer_equals_one_pass():
    layer = MultiHeadAttention(24, 6).double()
    x, memory, cache = torch.randn(2, 5, 24).double(), torch.randn(2, 7, 24).double(), KVCache()
    with torch.no_grad(), analysis.trace(layer) as t:
        for piece in x.split([2, 1, 2], dim=1):
            layer(piece, memory, cache=cache)
    with torch.no_grad(), analysis.trace(layer) as expected:
        layer(x, memory)
    assert t.runs == 1
    torch.testing.assert_close(t.weights(""), expected.weights(""))


@pytest.mark.parametrize("rows", [[2, 0, 0], [1, 1], [0, 2], [2]])
def test_reordered_cache_reorders_recorded_rows(rows):
    """Reordered rows keep their history; dropped rows remain, with zeros for later tokens."""
    model = decoder()
    ids = torch.randint(31, (3, 9))
    moved = torch.tensor(rows)
    cache = KVCache()
    with torch.no_grad(), analysis.trace(model, ATTENTION, OUTPUT) as t:
        model(ids[:, :5], cache=cache)
        cache.reorder(moved)
        model(ids[moved, 5:8], cache=cache)
        model(ids[moved, 8:], cache=cache)
    expected = run_at_once(model, ids)
    left_out = rows in ([0, 2], [2])
    weights, expected_weights = t.weights("blocks.1.attention"), expected.weights("blocks.1.attention")
    if left_out:
        torch.testing.assert_close(weights[moved], expected_weights[moved])
        torch.testing.assert_close(weights[:, :, :5], expected_weights[:, :, :5])
        removed = [row for row in range(3) if row not in rows]
        assert (weights[removed][:, :, 5:] == 0).all()
        torch.testing.assert_close(t.output("blocks.1")[moved], expected.output("blocks.1")[moved])
    else:
        torch.testing.assert_close(weights, expected_weights[moved])
        torch.testing.assert_close(t.output("blocks.1"), expected.output("blocks.1")[moved])


class ReferenceCache:
    """Reference implementation with token ids: the sequences, and the indices of those still computed."""

    def __init__(self, n):
        self.texts = [[] for _ in range(n)]
        self.live = list(range(n))

    def add(self, ids):
        for row, new in zip(self.live, ids.tolist(), strict=True):
            self.texts[row] = self.texts[row] + new

    def reorder(self, rows):
        parents = [self.live[row] for row in rows]
        if all(a < b for a, b in itertools.pairwise(rows)):
            self.live = parents
        else:
            self.texts, self.live = [self.texts[parent] for parent in parents], list(range(len(rows)))

    def crop(self, length):
        self.texts = [text[:length] for text in self.texts]


@settings(max_examples=30)
@given(data=st.data())
def test_random_cache_operations_match_reference(data):
    torch.manual_seed(0)
    model = decoder(n_layers=1)
    cache, reference = KVCache(capacity=2), ReferenceCache(3)
    path = "blocks.0.attention"
    with torch.no_grad(), analysis.trace(model, f"{path}.weights", "blocks.0.output") as t:
        for _ in range(data.draw(st.integers(1, 6), label="steps")):
            ids = torch.randint(31, (len(reference.live), data.draw(st.integers(1, 3), label="tokens")))
            model(ids, cache=cache)
            reference.add(ids)
            change = data.draw(st.sampled_from(["none", "reorder", "truncate"]))
            if change == "reorder":
                row = st.integers(0, len(reference.live) - 1)
                rows = data.draw(st.lists(row, min_size=1, max_size=4), label="rows")
                cache.reorder(torch.tensor(rows))
                reference.reorder(rows)
            elif change == "truncate" and cache.length > 1:
                length = data.draw(st.integers(1, cache.length - 1), label="length")
                cache.crop(length)
                reference.crop(length)
        newest = torch.randint(31, (len(reference.live), 1))  # replaces the truncated tokens
        model(newest, cache=cache)
        reference.add(newest)
    attention_map, outputs = t.weights(path), t.output("blocks.0")
    assert (t.runs, len(attention_map)) == (1, len(reference.texts))
    for row, text in enumerate(reference.texts):
        alone = run_at_once(model, torch.tensor([text])) if text else None
        n = len(text)
        if alone is not None:
            torch.testing.assert_close(attention_map[row, :, :n, :n], alone.weights(path)[0])
            torch.testing.assert_close(outputs[row, :n], alone.output("blocks.0")[0])
        assert (attention_map[row, :, n:] == 0).all()
        assert (outputs[row, n:] == 0).all()


def test_beam_search_records_final_beams():
    model = EncoderDecoder(tiny_encoder_decoder()).double().eval()
    source = torch.randint(model.config.vocab_size, (2, 7))
    with analysis.trace(model) as t:
        # The stop id is unset, so no beam ends early.
        generated = generate(model, source, strategy=BeamSearch(3, n_best=3), max_new_tokens=5, decoder_start_ids=1)
    # The last reordering depends on the last ids, which are not encoded: compare the rows before it.
    path = t.paths[-1]
    attention_map = t.weights(path, rows=-1)  # (6, H, 1, S): the last query of every beam
    target = torch.cat((torch.ones(6, 1, dtype=torch.long), generated.ids.flatten(0, 1)[:, :-1]), dim=1)
    expected = run_at_once(model, source.repeat_interleave(3, 0), target).weights(path, rows=-1)
    for row in expected:  # every result continues an active beam
        assert min(float((row - beam).abs().max()) for beam in attention_map) < 1e-9
