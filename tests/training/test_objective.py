"""The chunked loss and its gradients, compared with the loss of all logits, for all dtypes and chunk sizes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from clearhead.data import SortDedup
from clearhead.models import DecoderConfig, EncoderDecoderConfig
from clearhead.models.decoder import Decoder
from clearhead.training.objective import (
    ModelWithLoss,
    Objective,
    chunkable_model,
    chunked_loss,
    loss_of_logits,
    loss_sum,
    scores,
)
from tests.training.loss_inputs import M, V, gradients, random_inputs

CUTS = [(1 << 20, 1), (4 * 64, 64), (V, 1), (3 * V, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("smoothing", "r_drop_alpha"), [(0.0, 0.0), (0.13, 0.0), (0.1, 0.7)])
@pytest.mark.parametrize(("at_once", "multiple"), CUTS)
def test_chunked_loss_error_is_at_most_twice_that_of_all_logits(
    dtype, bias, smoothing, r_drop_alpha, at_once, multiple
):
    tensors, labels, weights = random_inputs(dtype, bias=bias, n_copies=2 if r_drop_alpha else 1)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in tensors]

    def plain(x, matrix, offset):
        logits = x @ matrix.T if offset is None else x @ matrix.T + offset
        return loss_of_logits(logits, labels, weights, smoothing, r_drop_alpha)

    truth = gradients(plain(*exact), exact)
    reference = gradients(plain(*tensors), tensors)
    objective = Objective(smoothing=smoothing, r_drop_alpha=r_drop_alpha, at_once=at_once, multiple=multiple)
    x, matrix, offset = tensors
    actual = gradients(chunked_loss(x, matrix, labels, weights, objective, offset), tensors)
    for got, by_reference, expected in zip(actual, reference, truth, strict=True):
        error, allowed = (got - expected).norm(), (by_reference - expected).norm()
        # A reference that happens to hit the truth leaves one unit in the last place of what is stored.
        assert error <= 2 * allowed + torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("r_drop_alpha", [0.0, 0.6])
def test_chunked_loss_gradients_equal_finite_differences(r_drop_alpha):
    tensors, labels, weights = random_inputs(torch.float64, bias=True, n_copies=2 if r_drop_alpha else 1, V=11)
    objective = Objective(smoothing=0.1, r_drop_alpha=r_drop_alpha, at_once=3 * 11, multiple=8)

    def of(x, matrix, offset):
        return chunked_loss(x, matrix, labels, weights, objective, offset)

    assert torch.autograd.gradcheck(of, tensors)
    logits = tensors[0] @ tensors[1].T + tensors[2]
    assert torch.allclose(of(*tensors), loss_of_logits(logits, labels, weights, 0.1, r_drop_alpha), rtol=1e-13)


def test_chunked_loss_ignores_rows_of_weight_zero():
    (x, matrix, _), labels, weights = random_inputs(torch.float32, bias=False)
    total = chunked_loss(x, matrix, labels, weights)
    total.backward()
    assert not x.grad[weights == 0].any()
    selected = weights > 0
    assert torch.allclose(chunked_loss(x[selected], matrix, labels[selected], weights[selected]), total)


def test_chunked_loss_under_autocast_uses_bfloat16_products_and_float32_sums():
    (x, matrix, _), labels, weights = random_inputs(torch.float32, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = chunked_loss(x, matrix, labels, weights)
        plain = loss_of_logits(torch.nn.functional.linear(x, matrix), labels, weights)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(plain.item(), rel=1e-5)
    total.backward()
    assert x.grad.dtype == matrix.grad.dtype == torch.float32


def models():
    decoder = DecoderConfig(vocab_size=8, max_len=32, d_model=12, n_heads=3, n_layers=1)
    yield decoder.build(), SortDedup(n_symbols=5, max_length=7, n_train=31, n_validation=11)
    yield (
        decoder.replace(tie_embeddings=False).build(),
        SortDedup(n_symbols=5, max_length=7, n_train=31, n_validation=11),
    )


@pytest.mark.parametrize(("model", "task"), list(models()), ids=["tied", "untied"])
def test_loss_sum_uses_hidden_states_with_equal_loss(model, task):
    batch = task.train.batch(torch.arange(13))
    plain = loss_of_logits(batch.logits(model), batch.labels, batch.weights, 0.1)
    plain.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    actual = loss_sum(model, batch, Objective(smoothing=0.1))
    actual.backward()
    assert actual.item() == pytest.approx(plain.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-4, atol=1e-5), name
    logits = batch.logits(model)
    right = ((logits.argmax(-1) == batch.labels) * batch.weights).sum()
    totals = scores(model, batch)
    assert totals[1] == right
    assert totals[0].item() == pytest.approx(loss_of_logits(logits, batch.labels, batch.weights).item(), rel=1e-6)


def test_encoder_decoder_hidden_states_times_lm_head_are_the_logits():
    config = EncoderDecoderConfig(vocab_size=23, d_model=12, n_heads=3, n_encoder_layers=1, n_decoder_layers=1)
    model = config.build().eval()
    source, target = torch.randint(23, (2, 5)), torch.randint(23, (2, 7))
    logits = model(source, target)
    assert torch.allclose(model.hidden_states(source, target) @ model.lm_head_weight().T, logits, atol=1e-6)


def test_chunkable_model_respects_custom_forward_and_hooks():
    class Louder(Decoder):
        def forward(self, ids, **calls):
            return 2 * super().forward(ids, **calls)

    config = DecoderConfig(vocab_size=8, max_len=32, d_model=12, n_heads=3, n_layers=1)
    batch = SortDedup(n_symbols=5, max_length=7, n_train=31, n_validation=11).train.batch(torch.arange(13))
    loud = Louder(config)
    expected = loss_of_logits(batch.logits(loud), batch.labels, batch.weights)
    assert loss_sum(loud, batch).item() == pytest.approx(expected.item(), rel=1e-6)
    model = config.build()
    assert chunkable_model(model) is model
    heard = []
    model.register_forward_hook(lambda *calls: heard.append(1))
    ModelWithLoss(model, Objective())(batch)
    assert heard == [1]


@pytest.mark.compiled
@pytest.mark.parametrize("r_drop_alpha", [0.0, 0.6])
def test_chunked_loss_compiled_equals_eager(r_drop_alpha):
    tensors, labels, weights = random_inputs(torch.float32, bias=False, n_copies=2 if r_drop_alpha else 1)
    x, matrix, _ = tensors
    plain = Objective(smoothing=0.1, r_drop_alpha=r_drop_alpha, at_once=8 * 64, multiple=64)
    expected = gradients(chunked_loss(x, matrix, labels, weights, plain), tensors)
    got = gradients(chunked_loss(x, matrix, labels, weights, plain.compiled(one_shape=False)), tensors)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_chunked_loss_never_stores_all_logits():
    """The largest tensor that is made is one chunk's."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    head = nn.Linear(M, 1009, bias=False)
    x = torch.randn(512, M, requires_grad=True)
    labels, weights = torch.randint(1009, (512,)), torch.ones(512)
    with Watch():
        chunked_loss(x, head.weight, labels, weights, Objective(at_once=16 * 1009)).backward()
    assert largest == 16 * 1009 < 512 * 1009


# ---------------------------------------------------------------------- the kernel, in Triton's interpreter

INTERPRETED = """
import itertools, json, torch
from clearhead.training.objective import Objective, chunked_loss
from tests.training.loss_inputs import random_inputs, gradients

found = []
for dtype, smoothing, multiple in itertools.product((torch.float32, torch.bfloat16), (0.0, 0.13), (1, 64)):
    (x, matrix, offset), labels, weights = random_inputs(dtype, bias=True)
    objective = Objective(smoothing=smoothing, at_once=300, multiple=multiple)
    actual = gradients(chunked_loss(x, matrix, labels, weights, objective, offset), (x, matrix, offset))
    found.append([tensor.tolist() for tensor in actual])
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_cross_entropy_kernel_error_is_at_most_twice_that_of_all_logits():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = itertools.product((torch.float32, torch.bfloat16), (0.0, 0.13), (1, 64))
    for (dtype, smoothing, _), actual in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        tensors, labels, weights = random_inputs(dtype, bias=True)
        exact = [t.detach().double().requires_grad_() for t in tensors]
        truth, reference = (
            gradients(loss_of_logits(x @ matrix.T + offset, labels, weights, smoothing), (x, matrix, offset))
            for x, matrix, offset in (exact, tensors)
        )
        for got, by_reference, expected in zip(actual, reference, truth, strict=True):
            error, allowed = (torch.tensor(got) - expected).norm(), (by_reference - expected).norm()
            assert error <= 2 * allowed + torch.finfo(dtype).eps * expected.norm()
