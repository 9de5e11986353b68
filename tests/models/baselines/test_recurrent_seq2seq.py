"""Tests of recurrent sequence-to-sequence models: written-out equations, cached steps, and training on a task."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clearhead.config import Config
from clearhead.errors import ConfigError, MaskError, ShapeError
from clearhead.masks import padding, window
from clearhead.models.baselines.recurrent import GRU, LSTM, RNN, RecurrentCache
from clearhead.models.baselines.recurrent_seq2seq import (
    AfterStep,
    BeforeStep,
    FixedVector,
    RecurrentSeq2Seq,
    RecurrentSeq2SeqConfig,
)

cells = pytest.mark.parametrize("cell", [RNN(), GRU(), LSTM()], ids=["rnn", "gru", "lstm"])
orders = pytest.mark.parametrize("order", [AfterStep(), BeforeStep(), FixedVector()], ids=["after", "before", "fixed"])
# Compiling and training take seconds, and the other orders compile the fixed vector too.
attending = pytest.mark.parametrize("order", [AfterStep(), BeforeStep()], ids=["after", "before"])
ways = pytest.mark.parametrize("bidirectional", [True, False], ids=["both", "one"])

SIZES = {"vocab_size": 23, "source_vocab_size": 19, "d_model": 7, "d_attention": 5}


def build(**changes):
    return RecurrentSeq2Seq(RecurrentSeq2SeqConfig(**(SIZES | changes))).double().eval()


def pair(B=3, S=11, T=13):
    return torch.randint(19, (B, S)), torch.randint(23, (B, T))


def by_hand(model, source, target):
    """One sentence, one GRU layer each, step by step from the equations, with plain cells."""
    ahead, behind = model.encoder.layers[0], model.encoder.reverse_layers[0]
    x = model.source_embedding.weight[source]  # (S, M)
    S, M = x.shape
    h, forward = x.new_zeros(M), []
    for t in range(S):
        h = ahead(x[t], h)
        forward.append(h)
    h, backward = x.new_zeros(M), []
    for t in reversed(range(S)):
        h = behind(x[t], h)
        backward.insert(0, h)
    memory = torch.cat((torch.stack(forward), torch.stack(backward)), 1)  # (S, 2M)
    last = torch.cat((forward[-1], backward[0]))

    def look(state):
        if isinstance(model.config.attention, FixedVector):
            return last
        layer = model.attention
        W, U, u = (p[0] for p in (layer.query_weight, layer.key_weight, layer.out_weight))
        scores = torch.stack([torch.tanh(state @ W + key @ U) @ u[:, 0] for key in memory])
        return scores.softmax(0) @ memory

    state = torch.tanh(model.bridge(last))
    cell, logits = model.decoder.layers[0], []
    for token in target:
        y = model.target_embedding.weight[token]
        if isinstance(model.config.attention, BeforeStep):
            context = look(state)
            state = cell(torch.cat((y, context)), state)
        else:
            state = cell(y, state)
            context = look(state)
        logits.append(model.head(torch.tanh(model.mix(torch.cat((state, context))))))
    return torch.stack(logits)


@orders
def test_forward_matches_written_out_equations(order):
    model = build(cell=GRU(), attention=order)
    source, target = pair(B=1)
    torch.testing.assert_close(model(source, target)[0], by_hand(model, source[0], target[0]))


@cells
@orders
@ways
def test_source_padding_does_not_change_logits(cell, order, bidirectional):
    model = build(cell=cell, attention=order, bidirectional=bidirectional, n_layers=2)
    source, target = pair()
    lengths = torch.tensor([11, 5, 1])
    other = torch.where(torch.arange(11) < lengths[:, None], source, torch.randint(19, (3, 11)))
    assert (other != source).any()
    mask = padding(lengths)
    out = model(source, target, source_mask=mask)
    torch.testing.assert_close(out, model(other, target, source_mask=mask), rtol=0, atol=0)
    for row, length in enumerate(lengths.tolist()):
        alone = model(source[row : row + 1, :length], target[row : row + 1])
        torch.testing.assert_close(out[row : row + 1], alone)


@orders
def test_left_source_padding_does_not_change_logits(order):
    model = build(attention=order)
    source, target = pair(B=2)
    lengths = torch.tensor([7, 11])
    out = model(source, target, source_mask=padding(lengths, left_pad=11 - lengths))
    torch.testing.assert_close(out[:1], model(source[:1, 4:], target[:1]))


@cells
@orders
def test_decoder_is_causal_in_the_target(cell, order):
    model = build(cell=cell, attention=order, n_layers=2)
    source, target = pair()
    other = target.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 23
    a, b = model(source, target), model(source, other)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=0, atol=0)
    assert not torch.isclose(a[:, 5:], b[:, 5:]).all(-1).any()


@cells
@orders
@ways
def test_cached_steps_match_full_forward(cell, order, bidirectional):
    model = build(cell=cell, attention=order, bidirectional=bidirectional, n_layers=2)
    source, target = pair()
    mask = padding(torch.tensor([11, 5, 7]))
    memory = model.encode(source, mask=mask)
    cache = RecurrentCache()
    pieces = [model.decode(piece, memory, memory_mask=mask, cache=cache) for piece in target.split((1, 3, 1, 8), 1)]
    assert cache.length == 13
    torch.testing.assert_close(torch.cat(pieces, 1), model(source, target, source_mask=mask))


def test_reordered_cache_continues_each_beam():
    model = build(n_layers=2)
    source, target = pair()
    memory, cache, rows = model.encode(source), RecurrentCache(), torch.tensor([2, 0, 0])
    model.decode(target, memory, cache=cache)
    cache.reorder(rows)
    new = torch.randint(23, (3, 1))
    out = model.decode(new, memory[rows], cache=cache)
    torch.testing.assert_close(out[:, 0], model(source[rows], torch.cat((target[rows], new), 1))[:, -1])


def test_fully_padded_source_gives_finite_outputs_and_gradients():
    for order in (AfterStep(), BeforeStep(), FixedVector()):
        model = build(attention=order)
        source, target = pair(B=2)
        out = model(source, target, source_mask=padding(torch.tensor([0, 5])))
        out.square().sum().backward()
        assert out.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters())


@cells
@orders
@ways
def test_parameter_count_equals_formula(cell, order, bidirectional):
    n_layers, M, A, V, Vs = 2, 7, 5, 23, 19
    gates = {RNN: 1, GRU: 3, LSTM: 4}[type(cell)]
    W = 2 * M if bidirectional else M
    layer = lambda d_in: gates * (M * d_in + M * M + 2 * M)  # noqa: E731
    encoder = (W // M) * (layer(M) + layer(W))
    decoder = layer(M + W if order == BeforeStep() else M) + layer(M)
    bridge = n_layers * (2 if cell == LSTM() else 1) * M * (W + 1)
    attention = 0 if order == FixedVector() else M * A + W * A + A
    output = M * (M + W + 1) + V * (M + 1)
    model = build(cell=cell, attention=order, bidirectional=bidirectional, n_layers=n_layers)
    expected = Vs * M + V * M + encoder + decoder + bridge + attention + output
    assert sum(p.numel() for p in model.parameters()) == expected


@orders
def test_gradients_pass_gradcheck(order):
    model = build(cell=GRU(), attention=order, d_model=2, d_attention=3)
    _, target = pair(B=2, S=3, T=2)
    mask = padding(torch.tensor([3, 2]))
    memory = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: model.decode(target, m, memory_mask=mask), memory)


@cells
@orders
def test_autocast_returns_finite_outputs(cell, order):
    """Under autocast torch chooses the dtype of the states per cell, so attention must accept both dtypes."""
    model = build(cell=cell, attention=order).float()
    source, target = pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(source, target, source_mask=padding([11, 4, 7]))
    logits.sum().backward()
    assert logits.isfinite().all()
    reads = model.bridge.weight if model.attention is None else model.attention.key_weight
    assert reads.grad.abs().max() > 0


@attending
def test_training_learns_to_reverse(order):
    # The first output is the last input: without looking at the source, chance is one in five.
    torch.manual_seed(0)
    model = RecurrentSeq2Seq(
        RecurrentSeq2SeqConfig(vocab_size=6, source_vocab_size=5, d_model=24, cell=GRU(), attention=order)
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = torch.full((64, 1), 5)
    for _ in range(120):
        source = torch.randint(5, (64, 5))
        target = source.flip(1)
        logits = model(source, torch.cat((start, target[:, :-1]), 1))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.25  # log 5 = 1.61 is not looking


@pytest.mark.bad_input
def test_invalid_input_raises():
    model = build()
    source, target = pair()
    with pytest.raises(ShapeError, match=r"source ids have shape \(11,\)"):
        model(source[0], target)
    with pytest.raises(ShapeError, match="target ids have shape"):
        model(source, target[:, :0])
    with pytest.raises(
        ShapeError, match=r"memory of shape \(2, 11, 14\) for 3 targets, expected \(3, source tokens, 14\)"
    ):
        model.decode(target, model.encode(source[:2]))
    with pytest.raises(ShapeError, match=r"as returned by encode\(\)"):
        model.decode(target, torch.randn(3, 11, 7, dtype=torch.float64))
    with pytest.raises(MaskError, match="differs from query to query"):
        model(source, target, source_mask=window(1, 1))


@pytest.mark.bad_input
def test_invalid_configurations_raise_config_error():
    with pytest.raises(ConfigError, match="source_vocab_size is 0; expected a whole number"):
        build(source_vocab_size=0)
    with pytest.raises(ConfigError, match="attention is 'additive'; expected AfterStep"):
        build(attention="additive")
    with pytest.raises(ConfigError, match=r"dropout is -0\.1; expected a number of at least 0"):
        build(dropout=-0.1)


@cells
@orders
def test_config_round_trips_through_dict_and_toml(cell, order):
    config = RecurrentSeq2SeqConfig(**SIZES, cell=cell, attention=order, n_layers=2, dropout=0.1)
    assert Config.from_toml(config.to_toml()) == config
    assert isinstance(config.build(), RecurrentSeq2Seq)


@pytest.mark.compiled
@cells
@attending
def test_compiled_full_graph_matches_eager(cell, order):
    torch.compiler.reset()
    model = build(cell=cell, attention=order).float()
    source, target = pair(S=3, T=2)
    mask = padding(torch.tensor([3, 1, 2]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    outputs = [m(source, target, source_mask=mask) for m in (model, compiled)]
    torch.testing.assert_close(*outputs)
    upstream = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(out, list(model.parameters()), upstream) for out in outputs]
    torch.testing.assert_close(*gradients)


@pytest.mark.compiled
@attending
def test_compiled_cached_steps_match_eager(order):
    torch.compiler.reset()
    model = build(attention=order, n_layers=2).float()
    source, target = pair()
    mask = padding(torch.tensor([11, 5, 7]))
    compiled = torch.compile(model.decode, fullgraph=True, backend="aot_eager")
    cache = RecurrentCache()
    with torch.no_grad():
        memory = model.encode(source, mask=mask)
        steps = [compiled(target[:, t : t + 1], memory, memory_mask=mask, cache=cache) for t in range(13)]
        torch.testing.assert_close(torch.cat(steps, 1), model(source, target, source_mask=mask))
