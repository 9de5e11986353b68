"""Generation restores modes and contexts, and its results are ordinary tensors."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks.generation import cache_speed
from clearhead.generation import BeamSearch, Generated, Greedy, Sample, generate, stream
from tests.generation.small import VOCAB, decoder, prompts

# ---------------------------------------------------------------------- modes


def modes(model):
    return [module.training for module in model.modules()]


def mixed(model):
    """Return a model in training mode with its second block in evaluation mode."""
    model.train()
    model.blocks[1].eval()
    return model


@pytest.mark.parametrize("strategy", [Greedy(), Sample(), BeamSearch(2)], ids=str)
def test_generate_disables_dropout_and_restores_modes(strategy):
    model = mixed(decoder())
    before = modes(model)
    during = []
    model.embedding.register_forward_hook(lambda *_: during.append(any(modes(model))))
    training = generate(model, prompts(VOCAB), strategy=strategy, max_new_tokens=5)
    assert modes(model) == before
    assert during == [False] * 5
    assert torch.equal(training.ids, generate(model.eval(), prompts(VOCAB), strategy=strategy, max_new_tokens=5).ids)


def test_stream_restores_modes_between_steps():
    model = mixed(decoder())
    before = modes(model)
    steps = stream(model, prompts(VOCAB), max_new_tokens=5)
    for _ in range(3):
        next(steps)
        assert modes(model) == before
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    steps.close()
    assert modes(model) == before


@pytest.mark.parametrize("function", [generate, lambda *a, **k: list(stream(*a, **k))], ids=["generate", "stream"])
def test_interrupt_restores_modes(function):
    model = mixed(decoder())
    before, calls = modes(model), []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        function(model, prompts(VOCAB), max_new_tokens=7)
    assert modes(model) == before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_finished_thread_keeps_dropout_off_for_other_threads():
    model = mixed(decoder())
    before, during = modes(model), []
    other_runs, first_ended = threading.Event(), threading.Event()

    def hook(*_):
        if threading.current_thread() is other:
            other_runs.set()
            assert first_ended.wait()
            during.append(any(modes(model)))
        elif not other.ident:
            other.start()
            assert other_runs.wait()

    other = threading.Thread(target=lambda: generate(model, prompts(VOCAB), max_new_tokens=3))
    model.embedding.register_forward_hook(hook)
    generate(model, prompts(VOCAB), max_new_tokens=3)
    first_ended.set()
    other.join()
    assert during == [False] * 3
    assert modes(model) == before


def test_results_can_be_embedded_with_gradients():
    """Tensors created in inference mode cannot be used with autograd."""
    model = decoder()
    for strategy in (Greedy(), Sample(), BeamSearch(2)):
        result = generate(model, prompts(VOCAB), strategy=strategy, max_new_tokens=5)
        assert not result.ids.is_inference()
        assert not result.log_probs.is_inference()
        model(result.ids[:, 0]).sum().backward()
    for step in stream(model, prompts(VOCAB), max_new_tokens=2):
        assert not step.ids.is_inference()
        assert not step.log_probs.requires_grad


# ---------------------------------------------------------------------- results


def test_generated_repr_and_accessors():
    result = generate(decoder(), prompts(VOCAB), strategy=BeamSearch(3, n_best=2), max_new_tokens=5)
    assert repr(result) == "Generated(6 prompts × 2 sequences, up to 5 ids each, 0 ended with a stop id)"
    assert len(result) == len(result.best) == 6
    assert torch.equal(result.best[3], result.sequence(3))
    assert isinstance(result.to("cpu"), Generated)
    assert torch.equal(result.to("cpu").ids, result.ids)


def test_cache_speed_compares_same_ids():
    result = cache_speed(decoder(), prompt=17, max_new_tokens=23, batch=2, repeats=2)
    assert result.same_ids
    assert result.new_ids == 23
    assert result.speedup == result.recomputed / result.cached > 0
