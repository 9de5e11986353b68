"""Every model compiles whole, in training and in cached decoding, and gives the same numbers.

`fullgraph=True` makes torch raise at the first line it cannot trace. Run apart (`pytest -m compiled`), because the
shape checks of the other tests do not trace. Most cases use the back end "aot_eager": it traces forward and backward
like the real one, but runs torch's own kernels, in a second instead of the half minute of C++ compilation that
"inductor" takes for each; one decoder goes all the way through inductor. Two layers trace as one does, twice as long:
where nothing is between them, a model has one. Other recurrent models are compiled where their equations are tested."""

from __future__ import annotations

import pytest
import torch

from clearhead.masks import causal, every, padding, window
from clearhead.models import (
    AutoencoderConfig,
    ConvNetConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    LogisticRegressionConfig,
    MeanPooling,
    RecurrentConfig,
    VisionConfig,
)
from clearhead.models.baselines.convnet import ConvHead
from clearhead.models.baselines.recurrent import GRU, LSTM, RNN, RecurrentCache
from clearhead.nn import KVCache, PostNorm, RMSNorm, SwiGLU
from clearhead.nn.positions import Rotary
from tests.models.conftest import POSITIONS, SIZES, build_model

pytestmark = pytest.mark.compiled

VISION = {
    "image_size": (6, 9),
    "patch_size": 3,
    "n_channels": 2,
    "n_classes": 7,
    "d_model": 10,
    "n_layers": 1,
    "n_heads": 2,
}


@pytest.fixture(autouse=True)
def _fresh():
    """Each test traces again; graphs of another model would count against the limit of recompilations."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def random_ids(*shape, vocab=29):
    return torch.randint(vocab, shape)


def compiled(model, backend="aot_eager"):
    return torch.compile(model, fullgraph=True, backend=backend)


def assert_trains_alike(model, assert_close, *inputs, backend="aot_eager", batches=1, **named):
    """The same outputs and the same gradients of all weights, compiled and not.

    With `batches=2`, a smaller batch follows, for which torch traces sizes as symbols.
    """
    run = compiled(model.train(), backend)
    for batch in range(batches):
        part = [x[batch:] for x in inputs]
        expected = model(*part, **named)
        direction = torch.randn_like(expected)
        gradients = torch.autograd.grad((expected * direction).sum(), list(model.parameters()))
        got = run(*part, **named)
        assert_close(got, expected)
        again = torch.autograd.grad((got * direction).sum(), list(model.parameters()))
        for a, b in zip(again, gradients, strict=True):
            assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def assert_decodes_alike(call, full_output, ids, assert_close, cache, sizes=(3, 1, 1, 1, 1)):
    """`call(ids, cache)` on pieces of `ids` gives what `whole` gives at once; later steps need no new graph."""
    parts, start, graphs = [], 0, []
    with torch.no_grad():
        for size in [*sizes, 1, 1, 1]:
            parts.append(call(ids[:, start : start + size], cache))
            start += size
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert start == ids.shape[1]
    assert_close(torch.cat(parts, 1), full_output)
    assert graphs[-1] == graphs[-4], "the graph of one step serves the next"


# ---------------------------------------------------------------------- Transformers, training


@pytest.mark.parametrize("name", POSITIONS)
def test_compiled_decoder_training_equals_eager(name, assert_close):
    model = build_model(DecoderConfig(**SIZES, n_layers=1, positions=POSITIONS[name]))
    assert_trains_alike(model, assert_close, random_ids(3, 11), batches=2)


def test_compiled_encoder_training_with_padding_equals_eager(assert_close):
    model = build_model(EncoderConfig(**SIZES, n_layers=1, residual=PostNorm(), embedding_norm=True))
    for lengths in ([11, 4], [1, 7]):
        assert_trains_alike(model, assert_close, random_ids(2, 11), mask=padding(torch.tensor(lengths)))


def test_compiled_encoder_decoder_training_with_padding_equals_eager(assert_close):
    model = build_model(EncoderDecoderConfig(**SIZES, n_encoder_layers=1, n_decoder_layers=1, share_embeddings=True))
    hidden = padding(torch.tensor([7, 3]))
    assert_trains_alike(model, assert_close, random_ids(2, 7), random_ids(2, 3), source_mask=hidden)


@pytest.mark.parametrize("changes", [{}, {"pooling": MeanPooling()}], ids=["cls", "mean"])
def test_compiled_vision_training_equals_eager(changes, assert_close):
    model = build_model(VisionConfig(**VISION, **changes))
    assert_trains_alike(model, assert_close, torch.randn(3, 2, 6, 9, dtype=torch.float64), batches=2)


def test_compiled_training_with_sparse_mask_equals_eager(assert_close):
    model = build_model(DecoderConfig(**SIZES, n_layers=2, mask=causal() & (window(2, 0) | every(4))))
    assert_trains_alike(model, assert_close, random_ids(3, 11))


def test_dropout_compiles_to_a_full_graph():
    """Random numbers differ between the two; that the graph is whole, and drops, can be seen all the same."""
    model = build_model(
        DecoderConfig(**SIZES, n_layers=2, dropout=0.5, attention_dropout=0.5, feed_forward_dropout=0.5)
    ).train()
    run, ids = compiled(model), random_ids(3, 11)
    assert not torch.equal(run(ids), run(ids))
    run(ids).sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


# ---------------------------------------------------------------------- Transformers, decoding


@pytest.mark.parametrize("name", POSITIONS)
def test_compiled_decoder_decoding_equals_eager(name, assert_close):
    model = build_model(DecoderConfig(**SIZES, n_layers=1, positions=POSITIONS[name]))
    ids, run = random_ids(2, 10), compiled(model)
    assert_decodes_alike(lambda ids, cache: run(ids, cache=cache), model(ids), ids, assert_close, KVCache())


def test_compiled_encoder_decoder_decoding_equals_eager(assert_close):
    model = build_model(EncoderDecoderConfig(**SIZES, n_encoder_layers=1, n_decoder_layers=1, positions=Rotary()))
    source, target, hidden = random_ids(2, 7), random_ids(2, 10), padding(torch.tensor([7, 3]))
    expected = model(source, target, source_mask=hidden)
    with torch.no_grad():
        memory = compiled(model.encode)(source, mask=hidden)
    run = compiled(model.decode)
    assert_decodes_alike(
        lambda ids, cache: run(ids, memory, memory_mask=hidden, cache=cache),
        expected,
        target,
        assert_close,
        KVCache(),
    )


def test_compiled_decoding_after_reorder_equals_eager(assert_close):
    model = build_model(DecoderConfig(**SIZES, n_layers=2, positions=Rotary()))
    ids, new, order = random_ids(2, 5), random_ids(2, 3), torch.tensor([1, 1])
    run = compiled(model)
    with torch.no_grad():
        cache = KVCache()
        run(ids, cache=cache)
        cache.reorder(order)
        cache.crop(4)
        parts = [run(new[:, i : i + 1], cache=cache) for i in range(3)]
        assert_close(torch.cat(parts, 1), model(torch.cat((ids[order, :4], new), 1))[:, 4:])


@pytest.mark.slow
def test_inductor_training_and_decoding_equal_eager(assert_close):
    """The default back end, with the parts that a current language model has."""
    config = DecoderConfig(
        **SIZES, n_layers=1, positions=Rotary(), norm=RMSNorm(), activation=SwiGLU(), bias=False, tie_embeddings=False
    )
    model, ids = build_model(config), random_ids(2, 10)
    assert_trains_alike(model, assert_close, random_ids(2, 10), backend="inductor")
    run = compiled(model.eval(), "inductor")
    assert_decodes_alike(lambda ids, cache: run(ids, cache=cache), model(ids), ids, assert_close, KVCache())


# ---------------------------------------------------------------------- baselines


def test_compiled_dense_baselines_training_equals_eager(assert_close):
    x = torch.randn(3, 13, dtype=torch.float64)
    assert_trains_alike(build_model(LogisticRegressionConfig(n_features=13, n_classes=5)), assert_close, x)
    assert_trains_alike(build_model(AutoencoderConfig(n_features=13, hidden=(7,), d_latent=3)), assert_close, x)


@pytest.mark.parametrize("changes", [{}, {"head": ConvHead()}], ids=["linear", "convolution"])
def test_compiled_convnet_training_equals_eager(changes, assert_close):
    model = build_model(ConvNetConfig(**changes))
    assert_trains_alike(model, assert_close, torch.randn(3, 1, 32, 32, dtype=torch.float64))


@pytest.mark.parametrize("cell", [RNN(), GRU(), LSTM()], ids=["rnn", "gru", "lstm"])
def test_compiled_recurrent_training_and_decoding_equal_eager(cell, assert_close):
    model = build_model(RecurrentConfig(vocab_size=31, d_model=11, cell=cell))
    assert_trains_alike(model, assert_close, random_ids(3, 3))
    ids, run = random_ids(2, 10), compiled(model.eval())
    assert_decodes_alike(lambda ids, cache: run(ids, cache=cache), model(ids), ids, assert_close, RecurrentCache())
