"""A `Cost` is data: it can be pickled, does not keep the module alive, and patches nothing of this package."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from clearhead.analysis.checks import Embeddings
from clearhead.analysis.cost import cost, dispatch
from clearhead.attention import attend
from clearhead.masks import causal, window


class Net(nn.Module):
    """A module without a configuration, so that its formulas need a second execution of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 29)
        self.down = nn.Linear(29, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_cost_of_a_module_does_not_keep_the_module_alive():
    net = Net()
    module, weight = weakref.ref(net), weakref.ref(net.up.weight)
    expected = str(cost(net, tokens=7, batch=3, inputs=Embeddings(12)).forward.formula)
    prediction = cost(net, tokens=7, batch=3, inputs=Embeddings(12))
    del net
    gc.collect()
    assert module() is None
    assert weight() is None
    assert str(prediction.forward.formula) == expected == "1392*B*T"


@pytest.mark.parametrize(
    ("subject", "options"),
    [
        ("tiny-decoder", {"tokens": 13, "training": True}),
        ("tiny-decoder", {"tokens": 13, "mask": window(3, 0)}),
        ("gpt2", {"tokens": 1000, "mask": causal() & window(16, 0), "impl": "sparse"}),
        (Net(), {"tokens": 13, "inputs": Embeddings(12)}),
    ],
    ids=["training", "mask", "plan", "module"],
)
def test_pickled_cost_has_the_same_values_and_formulas(subject, options):
    prediction = cost(subject, **options)
    assert prediction.parameters.value > 0  # a cached count does not prevent pickling
    copy = pickle.loads(pickle.dumps(prediction))
    assert copy.to_dict() == prediction.to_dict()
    assert copy.memory.peak.latex == prediction.memory.peak.latex
    assert str(copy) == str(prediction)


def test_pickled_count_has_the_same_value_and_formula():
    count = cost("tiny-decoder", tokens=13).parameters
    copy = pickle.loads(pickle.dumps(count))
    assert (copy.value, copy.formula) == (count.value, count.formula)


def test_dispatch_patches_no_function_of_this_package():
    assert not [name for name, *_ in dispatch._PATCHES if name.startswith("clearhead")]


def test_functions_that_dispatch_patches_exist():
    pytest.importorskip("transformers.masking_utils")
    for module, function, _ in dispatch._PATCHES:
        assert callable(getattr(__import__(module, fromlist=[function]), function)), f"{module}.{function} is gone"


class BiasedAttention(nn.Module):
    """An attention layer with a score bias, computed by the reference implementation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unsqueeze(1)
        return attend(heads, heads, heads, causal(), bias=heads @ heads.mT, impl="reference").squeeze(1)


def test_cost_of_a_biased_reference_call_charges_the_path_without_hidden_keys():
    names = [record.name for record in cost(BiasedAttention(), tokens=7, inputs=Embeddings(12), device="cpu").log.ops]
    assert "ne" not in names  # the bias is not compared with −∞, as on the path of a bias that hides nothing
