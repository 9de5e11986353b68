"""Which modules may call attention, by their code."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead import analysis
from clearhead.analysis.tracing.call_analysis import calls_attention, calls_torch_attention, modules_to_hook
from clearhead.models import DecoderConfig
from clearhead.nn import MultiHeadAttention


def attention_of_another_file(q, k, v):
    """A Python function may attend."""
    return F.scaled_dot_product_attention(q, k, v)


REGISTRY = {"sdpa": attention_of_another_file}


class Harmless(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return F.gelu(self.linear(x)) * math.sqrt(2) + torch.ones_like(x)


class CallsFunction(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class CallsHelper(nn.Module):
    def forward(self, x):
        return attention_of_another_file(x, x, x)


class CallsRegistry(nn.Module):
    def forward(self, x):
        return REGISTRY["sdpa"](x, x, x)


class CallsInMethod(Harmless):
    def attend_to(self, x):
        return [torch.nn.functional.scaled_dot_product_attention(y, y, y) for y in x]


class CallsAttribute(Harmless):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x, x, x)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Harmless(), False),
        (CallsFunction(), True),
        (CallsHelper(), True),
        (CallsRegistry(), True),
        (CallsInMethod(), True),
        (CallsAttribute(attention_of_another_file), True),
        (CallsAttribute(F.scaled_dot_product_attention), True),
        (nn.Linear(3, 3), False),
        (nn.MultiheadAttention(4, 2), True),
        (MultiHeadAttention(4, 2), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_calls_attention_follows_code_of_class(module, expected):
    assert calls_attention(module) is expected


def test_calls_torch_attention_excludes_layers_of_torch_and_clearhead():
    assert calls_torch_attention(CallsHelper())
    assert not calls_torch_attention(nn.MultiheadAttention(4, 2))
    assert not calls_torch_attention(MultiHeadAttention(4, 2))


def test_modules_to_hook_of_decoder_are_model_and_attention_layers():
    model = DecoderConfig(vocab_size=31, d_model=12, n_heads=3, n_layers=2).build()
    expected = [model, *(block.attention for block in model.blocks)]
    assert modules_to_hook(dict(model.named_modules())) == expected


@pytest.mark.parametrize("module", [CallsHelper(), CallsRegistry(), CallsAttribute(attention_of_another_file)])
def test_trace_finds_attention_of_indirect_calls(module):
    model = nn.Sequential(Harmless(), nn.Sequential(module))
    with torch.no_grad(), analysis.trace(model) as t:
        model(torch.randn(2, 3, 5, 4))
    assert t.paths == ["1.0"]
    assert t.difference("1.0") <= t.tolerance("1.0")
