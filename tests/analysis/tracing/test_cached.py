"""Generation with a cache, stitched into one picture, against the same sequence run at once."""

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


def at_once(model, *args, **kwargs):
    with torch.no_grad(), analysis.trace(model, "**.weights", "**.blocks.*.output") as t:
        model(*args, **kwargs)
    return t


def in_steps(model, ids, sizes, cache=None, **kwargs):
    cache = KVCache(capacity=3) if cache is None else cache
    with torch.no_grad(), analysis.trace(model, ATTENTION, OUTPUT, "output") as t:
        for piece in ids.split(sizes, dim=1):
            model(piece, cache=cache, **kwargs)
    return t


def assert_same(one, other):
    for path in other.paths:
        assert one.runs == other.runs == 1
        torch.testing.assert_close(one.weights(path), other.weights(path))
        torch.testing.assert_close(one.values(path), other.values(path))
        torch.testing.assert_close(one.heads(path), other.heads(path))
        assert one.difference(path) <= one.tolerance(path)
    for (path, norm), (name, wanted) in zip(one.norms(), other.norms(), strict=True):
        assert path == name
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(one.output(path), other.output(path))


@pytest.mark.parametrize("positions", POSITIONS, ids=lambda p: type(p).__name__)
def test_steps_make_one_picture(positions):
    model = decoder(positions=positions)
    ids = torch.randint(31, (3, 11))
    assert_same(in_steps(model, ids, [5, 1, 2, 1, 1, 1]), at_once(model, ids))


@pytest.mark.parametrize("mask", [causal() & window(3, 0), causal() & (window(1, 0) | every(4))], ids=str)
def test_steps_under_a_sparse_mask_and_padding(mask):
    model = decoder(mask=mask)
    ids = torch.randint(31, (2, 11))
    hidden = padding([11, 9], left_pad=[0, 2])
    assert_same(in_steps(model, ids, [4, 1, 6], mask=hidden), at_once(model, ids, mask=hidden))


def test_rows_and_heads_of_a_stitched_run():
    model = decoder()
    ids = torch.randint(31, (3, 11))
    t = in_steps(model, ids, [5, 1, 2, 3])
    whole = t.weights("blocks.1.attention")
    rows = [10, 4, 5, 0, 7]
    torch.testing.assert_close(t.weights("blocks.1.attention", heads=[4, 0], rows=rows), whole[:, [4, 0]][:, :, rows])
    pieces = torch.cat([piece for _, piece in t.weight_blocks("blocks.1.attention", 3)], 1)
    torch.testing.assert_close(pieces, whole[:, 3])
    assert t.weights("blocks.1.attention", rows=[]).shape == (3, 6, 0, 11)


def test_greedy_generation_of_a_decoder():
    model = decoder()
    prompt = torch.randint(31, (2, 5))
    with analysis.trace(model) as t:
        made = generate(model, prompt, strategy=Greedy(), max_new_tokens=7)
    ids = torch.cat((prompt, torch.stack(list(made.best))[:, :-1]), dim=1)  # the last id is not read again
    wanted = at_once(model, ids)
    for path in wanted.paths:
        torch.testing.assert_close(t.weights(path), wanted.weights(path))


def test_generation_without_a_cache_is_a_run_a_step():
    model = decoder()
    prompt = torch.randint(31, (1, 5))
    with analysis.trace(model) as cached:
        generate(model, prompt, strategy=Greedy(), max_new_tokens=4)
    with analysis.trace(model) as t:
        generate(model, prompt, strategy=Greedy(), max_new_tokens=4, use_cache=False)
    assert (t.runs, cached.runs) == (4, 1)
    assert t.weights("blocks.0.attention", run=0).shape == (1, 6, 5, 5)
    torch.testing.assert_close(t.weights("blocks.0.attention"), cached.weights("blocks.0.attention"))


def test_an_encoder_decoder_with_its_cross_attention():
    model = EncoderDecoder(tiny_encoder_decoder()).double().eval()
    source = [torch.randint(model.config.vocab_size, (n,)) for n in (7, 4)]
    with analysis.trace(model) as t:
        made = generate(model, source, strategy=Greedy(), max_new_tokens=5, decoder_start_ids=1)
    target = torch.cat((torch.ones(2, 1, dtype=torch.long), torch.stack(list(made.best))[:, :-1]), dim=1)
    padded = torch.nn.utils.rnn.pad_sequence(source, batch_first=True)
    wanted = at_once(model, padded, target, source_mask=padding([7, 4]))
    assert t.runs == 1
    assert t.paths == wanted.paths
    for path in t.paths:
        torch.testing.assert_close(t.weights(path), wanted.weights(path))
        assert t.difference(path) <= t.tolerance(path)


def test_a_truncated_cache_goes_on_from_there():
    model = decoder()
    ids, other = torch.randint(31, (2, 9)), torch.randint(31, (2, 4))
    cache = KVCache()
    with torch.no_grad(), analysis.trace(model, ATTENTION, OUTPUT) as t:
        for piece in ids.split([5, 3, 1], dim=1):
            model(piece, cache=cache)
        cache.crop(6)
        for piece in other.split([1, 3], dim=1):
            model(piece, cache=cache)
    assert_same(t, at_once(model, torch.cat((ids[:, :6], other), dim=1)))


def test_sequences_that_take_turns_are_not_mixed_up():
    model = decoder()
    texts = [torch.randint(31, (2, 7)), torch.randint(31, (3, 9))]
    caches = [KVCache(), KVCache()]
    with torch.no_grad(), analysis.trace(model, "blocks.1.attention") as t:
        for start, stop in ((0, 4), (4, 6), (6, None)):
            for ids, cache in zip(texts, caches, strict=True):
                model(ids[:, start:stop], cache=cache)
    assert t.runs == 2
    for run, ids in enumerate(texts):
        wanted = at_once(model, ids).weights("blocks.1.attention")
        torch.testing.assert_close(t.weights("blocks.1.attention", run=run), wanted)


def test_a_cache_that_was_not_empty_shows_the_rows_that_were_seen():
    model = decoder()
    ids, cache = torch.randint(31, (2, 9)), KVCache()
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
    t = in_steps(model, ids[:, 4:], [3, 2], cache)
    wanted = at_once(model, ids).weights("blocks.1.attention", rows=slice(4, None))
    torch.testing.assert_close(t.weights("blocks.1.attention"), wanted)


def test_what_was_not_seen_is_a_gap_and_begins_another_run():
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
    wanted = at_once(model, ids).weights("blocks.1.attention")
    assert t.runs == 2
    torch.testing.assert_close(t.weights("blocks.1.attention", run=0), wanted[:, :, :5, :5])
    torch.testing.assert_close(t.weights("blocks.1.attention", run=1), wanted[:, :, 6:])
    assert torch.equal(t.input("embedding", run=0), ids[:, :5])  # ids are stitched, too


def test_a_mask_by_rows_counts_from_its_own_first_row():
    """The tensor of `allow` belongs to the queries of one call, wherever these stand in the sequence."""
    layer = MultiHeadAttention(24, 6).double()
    x, cache = torch.randn(2, 7, 24).double(), KVCache()
    allowed = torch.rand(2, 1, 3, 7) < 0.6
    with torch.no_grad(), analysis.trace(layer) as t:
        layer(x[:, :4], mask=causal(), cache=cache)
        layer(x[:, 4:], mask=allow(allowed), cache=cache)
    weights = t.weights("", rows=[4, 5, 6])
    assert ((weights > 0) == allowed).all()
    assert t.difference("") <= t.tolerance("")


def test_the_difference_is_that_of_the_worst_step(monkeypatch):
    from clearhead.attention.sdpa import SDPAImplementation

    model, ids, real = decoder(), torch.randint(31, (2, 9)), SDPAImplementation.run
    monkeypatch.setattr(
        SDPAImplementation, "run", lambda self, call: real(self, call) * (1.001 if call.S == 7 else 1.0)
    )
    t = in_steps(model, ids, [5, 1, 1, 2])
    path = "blocks.0.attention"
    assert t.difference(path) == t.difference(path, rows=6) > 10 * t.tolerance(path)
    assert t.difference(path, rows=[0, 5, 8]) <= t.tolerance(path)


def test_cross_attention_alone_with_its_cache():
    layer = MultiHeadAttention(24, 6).double()
    x, memory, cache = torch.randn(2, 5, 24).double(), torch.randn(2, 7, 24).double(), KVCache()
    with torch.no_grad(), analysis.trace(layer) as t:
        for piece in x.split([2, 1, 2], dim=1):
            layer(piece, memory, cache=cache)
    with torch.no_grad(), analysis.trace(layer) as whole:
        layer(x, memory)
    assert t.runs == 1
    torch.testing.assert_close(t.weights(""), whole.weights(""))


@pytest.mark.parametrize("rows", [[2, 0, 0], [1, 1], [0, 2], [2]])
def test_rows_follow_a_reordered_cache(rows):
    """Rows that change places take their history along; rows that are only left out stay, with zeros from then on."""
    model = decoder()
    ids = torch.randint(31, (3, 9))
    moved = torch.tensor(rows)
    cache = KVCache()
    with torch.no_grad(), analysis.trace(model, ATTENTION, OUTPUT) as t:
        model(ids[:, :5], cache=cache)
        cache.reorder(moved)
        model(ids[moved, 5:8], cache=cache)
        model(ids[moved, 8:], cache=cache)
    wanted = at_once(model, ids)
    left_out = rows in ([0, 2], [2])
    got, full = t.weights("blocks.1.attention"), wanted.weights("blocks.1.attention")
    if left_out:
        torch.testing.assert_close(got[moved], full[moved])
        torch.testing.assert_close(got[:, :, :5], full[:, :, :5])
        gone = [row for row in range(3) if row not in rows]
        assert (got[gone][:, :, 5:] == 0).all()
        torch.testing.assert_close(t.output("blocks.1")[moved], wanted.output("blocks.1")[moved])
    else:
        torch.testing.assert_close(got, full[moved])
        torch.testing.assert_close(t.output("blocks.1"), wanted.output("blocks.1")[moved])


class Simulated:
    """What a picture should hold, kept as token ids: each sequence of it, and which of them are still computed."""

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
def test_whatever_happens_to_a_cache_the_picture_follows(data):
    torch.manual_seed(0)
    model = decoder(n_layers=1)
    cache, wanted = KVCache(capacity=2), Simulated(3)
    path = "blocks.0.attention"
    with torch.no_grad(), analysis.trace(model, f"{path}.weights", "blocks.0.output") as t:
        for _ in range(data.draw(st.integers(1, 6), label="steps")):
            ids = torch.randint(31, (len(wanted.live), data.draw(st.integers(1, 3), label="tokens")))
            model(ids, cache=cache)
            wanted.add(ids)
            change = data.draw(st.sampled_from(["none", "reorder", "truncate"]))
            if change == "reorder":
                row = st.integers(0, len(wanted.live) - 1)
                rows = data.draw(st.lists(row, min_size=1, max_size=4), label="rows")
                cache.reorder(torch.tensor(rows))
                wanted.reorder(rows)
            elif change == "truncate" and cache.length > 1:
                length = data.draw(st.integers(1, cache.length - 1), label="length")
                cache.crop(length)
                wanted.crop(length)
        newest = torch.randint(31, (len(wanted.live), 1))  # what was truncated is void once there is something else
        model(newest, cache=cache)
        wanted.add(newest)
    attention_map, outputs = t.weights(path), t.output("blocks.0")
    assert (t.runs, len(attention_map)) == (1, len(wanted.texts))
    for row, text in enumerate(wanted.texts):
        alone = at_once(model, torch.tensor([text])) if text else None
        n = len(text)
        if alone is not None:
            torch.testing.assert_close(attention_map[row, :, :n, :n], alone.weights(path)[0])
            torch.testing.assert_close(outputs[row, :n], alone.output("blocks.0")[0])
        assert (attention_map[row, :, n:] == 0).all()
        assert (outputs[row, n:] == 0).all()


def test_beams_show_the_sequences_that_were_alive_at_the_end():
    model = EncoderDecoder(tiny_encoder_decoder()).double().eval()
    source = torch.randint(model.config.vocab_size, (2, 7))
    with analysis.trace(model) as t:
        # No beam ends early.
        made = generate(model, source, strategy=BeamSearch(3, n_best=3), max_new_tokens=5, decoder_start_ids=1)
    # The last reordering is made by the sequences' own last id, which is never read: compare what came before it.
    path = t.paths[-1]
    attention_map = t.weights(path, rows=-1)  # (6, H, 1, S): the last query of every beam
    target = torch.cat((torch.ones(6, 1, dtype=torch.long), made.ids.flatten(0, 1)[:, :-1]), dim=1)
    wanted = at_once(model, source.repeat_interleave(3, 0), target).weights(path, rows=-1)
    for row in wanted:  # every answer continues some beam that was alive
        assert min(float((row - beam).abs().max()) for beam in attention_map) < 1e-9
