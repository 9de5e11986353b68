"""Predicted parameters against the modules, and FLOPs against torch's counter: exactly, for every model."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clearhead.analysis.cost import AttentionSizes, cost
from clearhead.analysis.cost.predict import set_impl
from clearhead.analysis.inputs.example import example
from clearhead.models import PRESETS
from clearhead.models.baselines.recurrent import LSTM
from clearhead.nn import MultiHeadAttention
from tests.analysis.cost.subjects import SUBJECTS, TRANSFORMERS, has_tokens, token_counts

SHAPES = ((2, 5, 3), (3, 7, 5), (5, 11, 7))  # batch, source, target: primes


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets_equal_module(name):
    config = PRESETS[name]()
    with torch.device("meta"):
        model = config.build()
    predicted = cost(name, tokens=31 if has_tokens(config) else None)
    assert predicted.parameters.value == sum(p.numel() for p in model.parameters())
    formula = predicted.parameters.formula
    values = {symbol: predicted.sizes[str(symbol)] for symbol in formula.free_symbols}
    assert formula.subs(values) == predicted.parameters.value


@pytest.mark.parametrize("name", SUBJECTS)
def test_parameters_equal_module(name):
    config = SUBJECTS[name]
    predicted = cost(config, tokens=token_counts(config, 7, 5)).parameters.value
    assert predicted == sum(p.numel() for p in config.build().parameters())


def count(config, batch, tokens):
    """Count forward and backward FLOPs with torch while the reference implementation runs."""
    # torch counts nothing inside the CPU's fused LSTM; meta tensors use the unfused implementation.
    device = "meta" if getattr(config, "cell", None) == LSTM() else "cpu"
    model = set_impl(config.build(), "reference").to(device).eval()
    sample = example(model, "it", tokens=tokens, batch=batch, device=device)
    with FlopCounterMode(display=False) as counter:
        loss = sample.loss(model)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_flops_equal_torch_counter(name, shape):
    config = SUBJECTS[name]
    batch, source, target = shape
    tokens = token_counts(config, source, target)
    predicted = cost(config, tokens=tokens, batch=batch, training=True, impl="reference")
    assert (predicted.forward.value, predicted.backward.value) == count(config, batch, tokens)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_formulas_reproduce_values(name):
    config = TRANSFORMERS[name]
    predicted = cost(config, tokens=token_counts(config, 13, 11), batch=3, training=True)
    counts = [predicted.parameters, predicted.forward, predicted.backward, predicted.bytes_accessed]
    counts += [count for _, count in predicted.memory.rows()]
    counts += [part.forward for part in predicted.parts] + [part.parameters for part in predicted.parts]
    for formula_count in counts:
        formula = formula_count.formula
        values = {symbol: predicted.sizes[str(symbol)] for symbol in formula.free_symbols}
        assert formula.subs(values) == formula_count.value


def test_cost_attention_sizes_has_expected_counts_and_formulas():
    predicted = cost(AttentionSizes(512, 8, bias=False), tokens=1000)
    assert predicted.parameters.value == 1_048_576
    assert str(predicted.parameters.formula) == "4*M**2"
    parts = {part.name: part.forward.value for part in predicted.parts}
    assert parts["q_proj"] == 2 * 1000 * 512 * 512
    assert str(predicted.forward.formula) == "4*B*M*T*(2*M + T)"
    assert predicted.pairs is not None
    assert predicted.pairs.dense.value == 1_000_000  # for each head


def test_cost_of_layer_equals_torch_counter():
    layer = MultiHeadAttention(33, 11, n_kv_heads=1, bias=False)
    predicted = cost(layer, tokens=(13, 7), batch=2, impl="reference")
    assert predicted.parameters.value == sum(p.numel() for p in layer.parameters())
    with FlopCounterMode(display=False) as counter:
        set_impl(layer, "reference")(torch.randn(2, 7, 33), torch.randn(2, 13, 33))
    assert predicted.forward.value == counter.get_total_flops()


def test_grouped_terms_equal_sums_over_the_operators():
    """The log is grouped once by quantity, phase and part; every count is read from the groups."""
    prediction = cost("tiny-decoder", tokens=13, batch=3, training=True)
    kernels = [(record, kernel) for record in prediction.log.ops for kernel in record.kernels]
    for phases, count in ((("forward",), prediction.forward), (("backward", "recompute"), prediction.backward)):
        assert count.value == sum(kernel.flops for record, kernel in kernels if record.phase in phases)
    forward = [(record, kernel) for record, kernel in kernels if record.phase == "forward"]
    assert prediction.bytes_accessed.value == sum(kernel.n_bytes for _, kernel in forward)
    for part in prediction.parts:
        in_part = [kernel for record, kernel in forward if re.sub(r"\.\d+", ".*", record.path) == part.name]
        assert part.forward.value == sum(kernel.flops for kernel in in_part)
        assert part.bytes_accessed.value == sum(kernel.n_bytes for kernel in in_part)
    assert sum(part.kernel_launches for part in prediction.parts) == len(kernels)
    assert prediction.log.terms is prediction.log.terms
