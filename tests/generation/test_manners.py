"""The world is left as it was found, and results are ordinary tensors."""

from __future__ import annotations

import threading

import pytest
import torch

from clearhead.bench.generation import cache_speed
from clearhead.generation import Beam, Generated, Greedy, Sample, generate, stream
from tests.generation.small import VOCAB, decoder, prompts

# ---------------------------------------------------------------------- modes


def modes(model):
    return [part.training for part in model.modules()]


def mixed(model):
    """A model in training whose second block a user has frozen in evaluation mode."""
    model.train()
    model.blocks[1].eval()
    return model


@pytest.mark.parametrize("how", [Greedy(), Sample(), Beam(2)], ids=str)
def test_dropout_is_off_during_and_modes_are_back_after(how):
    model = mixed(decoder())
    before = modes(model)
    during = []
    model.embedding.register_forward_hook(lambda *_: during.append(any(modes(model))))
    training = generate(model, prompts(VOCAB), how=how, max_new=5)
    assert modes(model) == before
    assert during == [False] * 5
    assert torch.equal(training.ids, generate(model.eval(), prompts(VOCAB), how=how, max_new=5).ids)


def test_between_the_steps_of_a_stream_the_model_is_as_it_was():
    model = mixed(decoder())
    before = modes(model)
    steps = stream(model, prompts(VOCAB), max_new=5)
    for _ in range(3):
        next(steps)
        assert modes(model) == before
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    steps.close()
    assert modes(model) == before


@pytest.mark.parametrize("way", [generate, lambda *a, **k: list(stream(*a, **k))], ids=["generate", "stream"])
def test_an_interruption_inside_the_model_leaves_it_as_it_was(way):
    model = mixed(decoder())
    before, calls = modes(model), []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        way(model, prompts(VOCAB), max_new=7)
    assert modes(model) == before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_thread_that_ends_leaves_dropout_off_for_the_others():
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

    other = threading.Thread(target=lambda: generate(model, prompts(VOCAB), max_new=3))
    model.embedding.register_forward_hook(hook)
    generate(model, prompts(VOCAB), max_new=3)
    first_ended.set()
    other.join()
    assert during == [False] * 3
    assert modes(model) == before


def test_results_can_be_trained_on():
    """Ids made in inference mode could not be embedded again with gradients; these can."""
    model = decoder()
    for how in (Greedy(), Sample(), Beam(2)):
        result = generate(model, prompts(VOCAB), how=how, max_new=5)
        assert not result.ids.is_inference()
        assert not result.log_probs.is_inference()
        model(result.ids[:, 0]).sum().backward()
    for step in stream(model, prompts(VOCAB), max_new=2):
        assert not step.ids.is_inference()
        assert not step.log_probs.requires_grad


# ---------------------------------------------------------------------- results


def test_a_result_shows_itself():
    result = generate(decoder(), prompts(VOCAB), how=Beam(3, n_best=2), max_new=5)
    assert repr(result) == "Generated(6 prompts × 2 sequences, up to 5 ids each, 0 ended with a stop id)"
    assert len(result) == len(result.best) == 6
    assert torch.equal(result.best[3], result.sequence(3))
    assert isinstance(result.to("cpu"), Generated)
    assert torch.equal(result.to("cpu").ids, result.ids)


def test_the_cache_is_timed_fairly():
    found = cache_speed(decoder(), prompt=17, max_new=23, batch=2, repeats=2)
    assert found.same
    assert found.new_ids == 23
    assert found.ratio == found.recomputed / found.cached > 0
