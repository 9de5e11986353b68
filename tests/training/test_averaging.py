from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead.errors import ConfigError
from clearhead.training import EMA, CheckpointAverage
from clearhead.training.checkpoint import _empty_like
from clearhead.training.step_runner import swapped_weights

DECAY = 0.7


def walk(n):
    """n weights, each a new point."""
    generator = torch.Generator().manual_seed(3)
    return [{"a": torch.randn(2, 3, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(n)]


def test_ema_is_the_weighted_sum():
    path = walk(11)
    choice, kept = EMA(DECAY), {}
    for step, weights in enumerate(path, start=1):
        choice.update(kept, weights, step)
    # The same as one sum over the whole path: each point's share is what it was given times all later decays.
    decays = [min(DECAY, (1 + step) / (10 + step)) for step in range(2, 12)]
    shares = [1.0] + [1 - d for d in decays]
    for later, decay in enumerate(decays, start=1):
        shares[:later] = [share * decay for share in shares[:later]]
    assert sum(shares) == pytest.approx(1.0)
    for name in path[0]:
        expected = sum(share * weights[name].double() for share, weights in zip(shares, path, strict=True))
        torch.testing.assert_close(choice.value(kept)[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_last_k_is_the_mean_of_the_last_snapshots():
    path = walk(17)
    choice, kept = CheckpointAverage(k=3, every=4), {}
    assert choice.value(kept) is None
    for step, weights in enumerate(path, start=1):
        choice.update(kept, weights, step)
    for name in path[0]:
        expected = torch.stack([path[step - 1][name] for step in (8, 12, 16)]).mean(0)
        torch.testing.assert_close(choice.value(kept)[name], expected)


@pytest.mark.parametrize("choice", [EMA(DECAY), CheckpointAverage(k=3, every=2)])
def test_stored_and_restored_it_goes_on_bit_for_bit(choice):
    path = walk(13)
    whole, first, second = {}, {}, {}
    for step, weights in enumerate(path, start=1):
        choice.update(whole, weights, step)
        choice.update(first if step <= 7 else second, weights, step)
        if step == 7:
            stored = {name: tensor.clone() for name, tensor in first.items()}
            places = _empty_like(weights, stored)
            assert {name: place.shape for name, place in places.items()} == {
                name: tensor.shape for name, tensor in stored.items()
            }
            second = stored
    for name, tensor in choice.value(whole).items():
        assert torch.equal(tensor, choice.value(second)[name])


def test_averaging_does_not_touch_the_weights():
    weights = {"a": torch.ones(3)}
    kept = {}
    EMA(0.5).update(kept, weights, 1)
    EMA(0.5).update(kept, {"a": torch.zeros(3)}, 2)
    assert torch.equal(weights["a"], torch.ones(3))


def test_borrowed_weights_are_given_back():
    model = nn.Linear(3, 5)
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    other = {name: torch.full_like(parameter, 2.0) for name, parameter in own.items()}

    def spoil():
        with swapped_weights(model, other):
            assert model.weight.eq(2.0).all()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        spoil()
    assert all(torch.equal(parameter, own[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(1.0), r"EMA: decay is 1\.0; expected a number above 0 and below 1"),
        (lambda: EMA(0.0), r"EMA: decay is 0\.0"),
        (lambda: CheckpointAverage(0), "CheckpointAverage: k is 0; expected a whole number of at least 1"),
        (lambda: CheckpointAverage(2, 0), "CheckpointAverage: every is 0; expected a whole number of at least 1"),
    ],
)
def test_bad_choices_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
