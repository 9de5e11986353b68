"""Tests that compare recurrent networks with torch's modules, packed sequences and hand-computed gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from clearhead.config import Config
from clearhead.errors import ConfigError, DtypeError, MaskError, MaskTypeError, ShapeError
from clearhead.masks import causal, padding
from clearhead.models.baselines.recurrent import (
    GRU,
    LSTM,
    RNN,
    Classify,
    NextToken,
    Recurrent,
    RecurrentCache,
    RecurrentConfig,
    RecurrentStack,
)

CELLS = [RNN(), RNN(relu=True), GRU(), LSTM()]
PEERS = {
    RNN(): nn.RNN,
    RNN(relu=True): lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    GRU(): nn.GRU,
    LSTM(): nn.LSTM,
}
GATES = {RNN(): 1, RNN(relu=True): 1, GRU(): 3, LSTM(): 4}
cells = pytest.mark.parametrize("cell", CELLS, ids=["rnn", "relu", "gru", "lstm"])

VOCAB, WIDTH = 23, 7


def peer_of(stack, cell, d_in, d_state, n_layers, bidirectional):
    """torch's module with a stack's weights."""
    peer = PEERS[cell](d_in, d_state, n_layers, batch_first=True, bidirectional=bidirectional).double()
    with torch.no_grad():
        for i in range(n_layers):
            for suffix, layers in (("", stack.layers), ("_reverse", stack.reverse_layers or ())):
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh") if layers else ():
                    getattr(peer, f"{name}_l{i}{suffix}").copy_(getattr(layers[i], name))
    return peer


def build(**changes):
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH}
    return Recurrent(RecurrentConfig(**(sizes | changes))).double().eval()


def ids(*shape):
    return torch.randint(VOCAB, shape)


# ---------------------------------------------------------------------- the stack is torch's


@cells
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_stack_matches_torch_module(cell, bidirectional, n_layers):
    stack = RecurrentStack(cell, 5, 7, n_layers, bidirectional=bidirectional).double()
    peer = peer_of(stack, cell, 5, 7, n_layers, bidirectional)
    x = torch.randn(3, 11, 5, dtype=torch.float64, requires_grad=True)
    module, reference = stack(x), peer(x)[0]
    torch.testing.assert_close(module, reference)
    upstream = torch.randn_like(module)
    torch.testing.assert_close(
        torch.autograd.grad(module, x, upstream)[0], torch.autograd.grad(reference, x, upstream)[0]
    )


@cells
@pytest.mark.parametrize("bidirectional", [False, True])
def test_right_padding_matches_packed_sequences_of_torch(cell, bidirectional):
    stack = RecurrentStack(cell, 5, 7, 2, bidirectional=bidirectional).double()
    peer = peer_of(stack, cell, 5, 7, 2, bidirectional)
    lengths = torch.tensor([11, 1, 5])
    x = torch.randn(3, 11, 5, dtype=torch.float64)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, final = peer(packed)
    reference, _ = pad_packed_sequence(out, batch_first=True, total_length=11)  # zero at padding, as ours
    real = torch.arange(11) < lengths[:, None]
    module = stack(x, real=real)
    torch.testing.assert_close(module, reference)
    h = final[0] if isinstance(cell, LSTM) else final
    last = h[-2:].transpose(0, 1).flatten(1) if bidirectional else h[-1]
    torch.testing.assert_close(stack.summary(module, real), last)


@cells
@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_anywhere_matches_rows_without_padding(cell, bidirectional):
    stack = RecurrentStack(cell, 5, 7, 2, bidirectional=bidirectional).double()
    x = torch.randn(3, 11, 5, dtype=torch.float64)
    real = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0], [1] * 11, [0] * 11]).bool()
    out = stack(x, real=real)
    for row in range(2):
        stored = real[row]
        torch.testing.assert_close(out[row : row + 1, stored], stack(x[row : row + 1, stored]))
        torch.testing.assert_close(stack.summary(out, real)[row], stack.summary(stack(x[row : row + 1, stored]))[0])
    assert (out[~real] == 0).all()
    assert (stack.summary(out, real)[2] == 0).all()


@cells
@pytest.mark.parametrize("bidirectional", [False, True])
def test_nan_at_padding_changes_no_output_or_gradient(cell, bidirectional):
    stack = RecurrentStack(cell, 5, 7, 2, bidirectional=bidirectional).double()
    real = torch.arange(11) < torch.tensor([7, 3])[:, None]
    clean = torch.randn(2, 11, 5, dtype=torch.float64)
    dirty = clean.masked_fill(~real[..., None], math.nan).requires_grad_()
    out = stack(dirty, real=real)
    torch.testing.assert_close(out, stack(clean, real=real), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(out.square().sum(), dirty)
    assert (gradient[~real] == 0).all()
    assert (gradient[real] != 0).any()
    assert gradient.isfinite().all()


@cells
def test_cached_states_skip_padding(cell):
    stack = RecurrentStack(cell, 5, 7, 2).double()
    x = torch.randn(2, 11, 5, dtype=torch.float64)
    real = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0], [1] * 11]).bool()
    ragged = RecurrentCache()
    torch.testing.assert_close(stack(x, real=real, cache=ragged), stack(x, real=real))
    for row in range(2):
        alone = RecurrentCache()
        stack(x[row : row + 1, real[row]], cache=alone)
        for module, reference in zip(ragged.states, alone.states, strict=True):
            for a, b in zip(module, reference, strict=True):
                torch.testing.assert_close(a[row : row + 1], b)


def test_dropout_applies_between_layers_only():
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    single_layer = RecurrentStack(GRU(), 3, 7, 1, dropout=0.5).double()
    assert torch.equal(single_layer(x), single_layer.eval()(x))
    two_layers = RecurrentStack(GRU(), 3, 7, 2, dropout=0.5).double()
    assert not torch.allclose(two_layers(x), two_layers(x))
    assert torch.equal(two_layers.eval()(x), two_layers(x))


# ---------------------------------------------------------------------- the exam's scalar network


def scalar(w, a, g):
    """h_t = g(w h_{t−1} + a x_t), as a stack of width one without bias."""
    stack = RecurrentStack(RNN(relu=g == "relu"), 1, 1, 1).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
        stack.layers[0].weight_hh.fill_(w)
        stack.layers[0].weight_ih.fill_(a)
    return stack


FUNCTIONS = {
    "tanh": (math.tanh, lambda z: 1 - math.tanh(z) ** 2),
    "relu": (lambda z: max(z, 0.0), lambda z: float(z > 0)),
}


@pytest.mark.parametrize("g", ["tanh", "relu"])
@pytest.mark.parametrize("x", [(0.7, -0.2), (1.3, 0.9), (-0.4, 0.8)])
def test_autograd_matches_exam_update_for_two_inputs(g, x):
    """Part 1 question 6: w ← w − η (h₂ − y) g′(z₂) h₁ for two inputs and the loss ½ (h₂ − y)²."""
    w, a, y, rate = 0.6, 1.1, 0.3, 0.1
    stack = scalar(w, a, g)
    optimiser = torch.optim.SGD(stack.parameters(), lr=rate)
    out = stack(torch.tensor(x, dtype=torch.float64).view(1, 2, 1))
    (0.5 * (out[0, -1, 0] - y) ** 2).backward()
    optimiser.step()
    function, slope = FUNCTIONS[g]
    h1 = function(a * x[0])
    z2 = w * h1 + a * x[1]
    expected = w - rate * (function(z2) - y) * slope(z2) * h1
    assert stack.layers[0].weight_hh.item() == pytest.approx(expected, abs=1e-12)


def test_gradient_of_three_inputs_includes_the_path_through_the_state():
    """With three inputs, h₂ depends on w too: (h₃ − y) g′(z₃) (h₂ + w g′(z₂) h₁)."""
    w, a, y, x = 0.6, 1.1, 0.3, (0.7, -0.2, 0.5)
    stack = scalar(w, a, "tanh")
    out = stack(torch.tensor(x, dtype=torch.float64).view(1, 3, 1))
    (0.5 * (out[0, -1, 0] - y) ** 2).backward()
    g, slope = FUNCTIONS["tanh"]
    h1 = g(a * x[0])
    z2 = w * h1 + a * x[1]
    z3 = w * g(z2) + a * x[2]
    expected = (g(z3) - y) * slope(z3) * (g(z2) + w * slope(z2) * h1)
    assert stack.layers[0].weight_hh.grad.item() == pytest.approx(expected, abs=1e-12)


# ---------------------------------------------------------------------- the model


@cells
def test_parameter_count_equals_formula(cell):
    gates, M, V = GATES[cell], WIDTH, VOCAB
    layer = gates * (M * M + M * M + 2 * M)
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    assert count(build(cell=cell, n_layers=2)) == V * M + 2 * layer + V * (M + 1)
    assert count(build(cell=cell, task=NextToken(tie_embeddings=True))) == V * M + layer
    upper = gates * (2 * M * M + M * M + 2 * M)  # reads both directions of the layer below
    both = build(cell=cell, n_layers=2, task=Classify(5), bidirectional=True)
    assert count(both) == V * M + 2 * layer + 2 * upper + 5 * (2 * M + 1)


@cells
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_language_model_is_causal(cell, tie_embeddings):
    model = build(cell=cell, n_layers=2, task=NextToken(tie_embeddings=tie_embeddings))
    inputs, changed = ids(3, 11), ids(3, 11)
    changed[:, :5] = inputs[:, :5]
    a, b = model(inputs), model(changed)
    assert a.shape == (3, 11, VOCAB)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=0, atol=0)
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_tied_logits_equal_written_out_steps():
    model = build(cell=GRU(), task=NextToken(tie_embeddings=True))
    cell, table = model.stack.layers[0], model.embedding.weight
    tokens = ids(1, 5)
    h = torch.zeros(1, WIDTH, dtype=torch.float64)
    for t in range(5):
        h = cell(table[tokens[:, t]], h)
        torch.testing.assert_close(model(tokens)[:, t], h @ table.T)


@cells
@pytest.mark.parametrize("cut", [1, 4, 10])
def test_cached_steps_match_full_forward(cell, cut):
    model = build(cell=cell, n_layers=2)
    tokens = ids(3, 11)
    cache = RecurrentCache()
    first = model(tokens[:, :cut], cache=cache)
    assert cache.length == cut
    remainder = [model(tokens[:, t : t + 1], cache=cache) for t in range(cut, 11)]
    assert cache.length == 11
    torch.testing.assert_close(torch.cat([first, *remainder], 1), model(tokens))


@cells
def test_classifier_with_cached_pieces_matches_full_forward(cell):
    model = build(cell=cell, n_layers=2, task=Classify(5))
    tokens, lengths = ids(2, 7), torch.tensor([7, 3])
    cache = RecurrentCache()
    for piece in tokens.split((2, 3, 2), 1):  # the last piece has nothing but padding for the second row
        out = model(piece, mask=padding(lengths), cache=cache)
    torch.testing.assert_close(out, model(tokens, mask=padding(lengths)))


def test_padded_prompts_continue_like_single_prompts():
    model = build(n_layers=2)
    lengths = torch.tensor([7, 3])
    prompts, more = ids(2, 7), ids(2, 1)
    prompts = torch.stack((prompts[0], prompts[1].roll(4)))  # the second is left-padded
    mask = padding(lengths, left_pad=7 - lengths)
    cache = RecurrentCache()
    model(prompts, mask=mask, cache=cache)
    longer = padding(lengths + 1, left_pad=7 - lengths)
    out = model(more, mask=longer, cache=cache)
    for row, start in enumerate((0, 4)):
        alone = torch.cat((prompts[row : row + 1, start:], more[row : row + 1]), 1)
        torch.testing.assert_close(out[row, -1], model(alone)[0, -1])


def test_cache_can_be_reordered_copied_and_detached():
    model = build(cell=LSTM(), n_layers=2)
    tokens = ids(3, 5)
    cache = RecurrentCache()
    model(tokens, cache=cache)
    branch = cache.copy()
    rows, new = torch.tensor([2, 2, 0, 1]), ids(4, 1)
    cache.reorder(rows)
    out = model(new, cache=cache)
    torch.testing.assert_close(out[:, 0], model(torch.cat((tokens[rows], new), 1))[:, -1])
    assert (branch.length, cache.length) == (5, 6)
    torch.testing.assert_close(model(new[:3], cache=branch)[:, 0], model(torch.cat((tokens, new[:3]), 1))[:, -1])
    assert branch.states[0][0].requires_grad
    branch.detach()
    assert not any(x.requires_grad for state in branch.states for x in state)
    assert repr(branch) == "RecurrentCache(6 tokens, 2 layers)"


@cells
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("task", "bidirectional"), [(NextToken(), False), (Classify(5), False), (Classify(5), True)])
def test_padding_does_not_change_logits_of_real_tokens(cell, side, task, bidirectional):
    model = build(cell=cell, n_layers=2, task=task, bidirectional=bidirectional)
    lengths = torch.tensor([11, 5, 1])
    before = torch.zeros(3, dtype=torch.long) if side == "right" else 11 - lengths
    mask = padding(lengths, left_pad=before)
    tokens, other = ids(3, 11), ids(3, 11)
    place = torch.arange(11)
    real = (place >= before[:, None]) & (place < (before + lengths)[:, None])
    other[real] = tokens[real]
    assert (other != tokens).any()
    a, b = model(tokens, mask=mask), model(other, mask=mask)
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    for row in range(3):
        alone = model(tokens[row, real[row]][None])
        torch.testing.assert_close(a[row, real[row]] if a.dim() == 3 else a[row], alone[0])


@cells
def test_bidirectional_classifier_depends_on_every_token(cell):
    model = build(cell=cell, task=Classify(3), bidirectional=True)
    x = model.embedding(ids(1, 7)).detach().requires_grad_()
    model.stack.summary(model.stack(x)).sum().backward()
    assert (x.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("cell", CELLS[::2], ids=["rnn", "gru"])
def test_gradients_pass_gradcheck(cell):
    stack = RecurrentStack(cell, 3, 2, 2, bidirectional=True).double()
    real = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: stack(x, real=real), x)


# ---------------------------------------------------------------------- errors and storage


ZEROS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("x", "mask", "error", "message"),
    [
        (torch.zeros(5, dtype=torch.long), None, ShapeError, r"ids have shape \(5,\); expected \(batch, tokens\)"),
        (torch.zeros(2, 0, dtype=torch.long), None, ShapeError, "at least one token"),
        (torch.rand(2, 3), None, DtypeError, r"ids are torch\.float32"),
        (torch.tensor([[VOCAB]]), None, ShapeError, "vocabulary has 23"),
        (ZEROS, causal(), MaskError, r"got the mask causal\(\), which differs from query to query"),
        (ZEROS, padding(torch.tensor([3, 2, 1])), ShapeError, "made for a batch of"),
        (ZEROS, torch.ones(2, 3, dtype=torch.bool), MaskTypeError, "allow"),
    ],
    ids=["one dimension", "empty", "floats", "id", "causal", "batch of mask", "tensor as mask"],
)
def test_invalid_input_raises(x, mask, error, message):
    with pytest.raises(error, match=message):
        build()(x, mask=mask)


@pytest.mark.bad_input
def test_cache_of_another_batch_raises():
    model, cache = build(), RecurrentCache()
    model(ids(2, 3), cache=cache)
    with pytest.raises(ShapeError, match=r"1 layers of \(2, 7\), expected 1 of \(5, 7\); a new batch or model"):
        model(ids(5, 3), cache=cache)


@pytest.mark.bad_input
def test_bidirectional_model_with_cache_raises():
    with pytest.raises(ConfigError, match="pass all of it at once"):
        build(task=Classify(3), bidirectional=True)(ids(2, 3), cache=RecurrentCache())


@pytest.mark.bad_input
def test_invalid_configurations_raise_config_error():
    with pytest.raises(ConfigError, match="would show the very token that is to be predicted"):
        build(bidirectional=True)
    with pytest.raises(ConfigError, match="n_layers is 0; expected a whole number"):
        build(n_layers=0)
    with pytest.raises(ConfigError, match=r"dropout is 1\.0; expected a number of at least 0 and below 1"):
        build(dropout=1.0)
    with pytest.raises(ConfigError, match=r"cell is 'lstm'; expected RNN\(…\) or GRU\(…\) or LSTM\(…\)"):
        build(cell="lstm")
    with pytest.raises(ConfigError, match="Classify: n_classes is 1; expected a whole number of at least 2"):
        Classify(1)


@cells
@pytest.mark.parametrize("task", [NextToken(tie_embeddings=True), Classify(5)])
def test_config_round_trips_through_dict_and_toml(cell, task):
    config = RecurrentConfig(vocab_size=23, d_model=7, n_layers=3, cell=cell, task=task, dropout=0.1)
    assert Config.from_toml(config.to_toml()) == config
    assert isinstance(config.build(), Recurrent)


# ---------------------------------------------------------------------- compiled


@pytest.mark.compiled
@cells
def test_compiled_full_graph_matches_eager(cell):
    torch.compiler.reset()
    model = build(cell=cell, n_layers=2, task=Classify(5), bidirectional=True).float()
    tokens, mask = ids(3, 3), padding(torch.tensor([3, 1, 2]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    outputs = [m(tokens, mask=mask) for m in (model, compiled)]
    torch.testing.assert_close(*outputs)
    upstream = torch.randn(3, 5)
    gradients = [torch.autograd.grad(out, list(model.parameters()), upstream) for out in outputs]
    torch.testing.assert_close(*gradients)


@pytest.mark.compiled
@cells
def test_compiled_cached_steps_match_eager_with_few_recompilations(cell):
    torch.compiler.reset()
    model = build(cell=cell, n_layers=2).float()
    tokens = ids(3, 11)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    cache = RecurrentCache()
    with torch.no_grad():
        steps = [compiled(tokens[:, t : t + 1], cache=cache) for t in range(11)]
        torch.testing.assert_close(torch.cat(steps, 1), model(tokens))
    assert counter.frame_count <= 3  # an empty cache, a full one, and one of any length
