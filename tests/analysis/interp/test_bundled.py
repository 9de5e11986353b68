"""Bundled models with each implementation: recomputed weights times values equal the outputs of the run."""

from __future__ import annotations

import functools

import pytest
import torch

from clearhead import analysis, hub
from clearhead.generation import Greedy, generate
from clearhead.masks import causal, padding
from clearhead.nn import MultiHeadAttention

IMPLEMENTATIONS = ("reference", "sdpa", "sparse")
MODELS = ("en-es", "sort-dedup", "digits-vit", "shakespeare")


@functools.cache
def model_of(name):
    return hub.pipeline(name).model.eval()


def run(name, model):
    """Run a padded batch, so that models that take a mask get one."""
    torch.manual_seed(0)
    config = model.config
    if name == "digits-vit":
        return model(torch.rand(3, config.n_channels, *config.image_size))
    if name == "en-es":
        source, target = (torch.randint(config.vocab_size, (3, n)) for n in (23, 17))
        return model(source, target, source_mask=padding([23, 11, 7]))
    return model(torch.randint(config.vocab_size, (3, 29)), mask=padding([29, 13, 5]))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_times_values_equal_layer_output(name, impl):
    model = model_of(name)
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    used = []

    def choose(layer, args, kwargs):
        # The sparse implementation needs a mask: a layer without one gets a mask that hides nothing.
        layer.impl = impl
        if impl == "sparse" and kwargs.get("mask") is None:
            T, S = args[0].shape[1], args[1 if len(args) > 1 else 0].shape[1]
            kwargs = {**kwargs, "mask": (causal() | ~causal()) if T == S else padding([S] * len(args[0]))}
        used.append(layer)
        return args, kwargs

    handles = [layer.register_forward_pre_hook(choose, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad(), analysis.trace(model) as t:
            run(name, model)
    finally:
        for handle, layer in zip(handles, layers, strict=True):
            handle.remove()
            layer.impl = "auto"
    assert len(t.paths) == len(layers) == len(used)
    for path in t.paths:
        assert t.difference(path) <= t.tolerance(path), path
        some = {"heads": [-1], "rows": slice(2, 5)}
        assert t.difference(path, **some) <= t.tolerance(path, **some)


@pytest.mark.parametrize("name", ["shakespeare", "sort-dedup"])
def test_traced_generation_stays_within_tolerance(name):
    model = model_of(name)
    with analysis.trace(model) as t:
        generate(model, torch.randint(model.config.vocab_size, (2, 7)), strategy=Greedy(), max_new_tokens=5)
    for path in t.paths:
        assert t.weights(path).shape[-2:] == (11, 11)
        assert t.difference(path) <= t.tolerance(path)
