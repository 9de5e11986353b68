"""Averages of the parameters, compared with sums over all updates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from clearhead.data import DatasetSplit, DatasetTask, FixedSize
from clearhead.errors import ConfigError
from clearhead.training import EMA, CheckpointAverage, Progress, TrainConfig, Trainer, read_log
from clearhead.training.checkpoint_tensors import empty_like_weights
from clearhead.training.step_runner import swapped_weights

DECAY = 0.7


def random_parameters(n):
    """Return n random sets of parameters."""
    generator = torch.Generator().manual_seed(3)
    return [{"a": torch.randn(2, 3, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(n)]


def test_ema_value_equals_weighted_sum():
    path = random_parameters(11)
    average, state = EMA(DECAY), {}
    for step, weights in enumerate(path, start=1):
        average.update(state, weights, step)
    # The average as one sum: the weight of each set is its own factor times all later decays.
    decays = [min(DECAY, (1 + step) / (10 + step)) for step in range(2, 12)]
    shares = [1.0] + [1 - d for d in decays]
    for later, decay in enumerate(decays, start=1):
        shares[:later] = [share * decay for share in shares[:later]]
    assert sum(shares) == pytest.approx(1.0)
    for name in path[0]:
        expected = sum(share * weights[name].double() for share, weights in zip(shares, path, strict=True))
        torch.testing.assert_close(average.value(state)[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_checkpoint_average_value_is_the_mean_of_the_last_snapshots():
    path = random_parameters(17)
    average, state = CheckpointAverage(k=3, every=4), {}
    assert average.value(state) is None
    for step, weights in enumerate(path, start=1):
        average.update(state, weights, step)
    for name in path[0]:
        expected = torch.stack([path[step - 1][name] for step in (8, 12, 16)]).mean(0)
        torch.testing.assert_close(average.value(state)[name], expected)


@pytest.mark.parametrize("average", [EMA(DECAY), CheckpointAverage(k=3, every=2)])
def test_average_restored_from_its_state_continues_bit_identically(average):
    path = random_parameters(13)
    uninterrupted, first, second = {}, {}, {}
    for step, weights in enumerate(path, start=1):
        average.update(uninterrupted, weights, step)
        average.update(first if step <= 7 else second, weights, step)
        if step == 7:
            stored = {name: tensor.clone() for name, tensor in first.items()}
            targets = empty_like_weights(weights, stored)
            assert {name: target.shape for name, target in targets.items()} == {
                name: tensor.shape for name, tensor in stored.items()
            }
            second = stored
    for name, tensor in average.value(uninterrupted).items():
        assert torch.equal(tensor, average.value(second)[name])


def test_ema_update_does_not_modify_the_parameters():
    weights = {"a": torch.ones(3)}
    state = {}
    EMA(0.5).update(state, weights, 1)
    EMA(0.5).update(state, {"a": torch.zeros(3)}, 2)
    assert torch.equal(weights["a"], torch.ones(3))


def test_swapped_weights_restores_the_parameters_after_an_error():
    model = nn.Linear(3, 5)
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    other = {name: torch.full_like(parameter, 2.0) for name, parameter in original.items()}

    def fail():
        with swapped_weights(model, other):
            assert model.weight.eq(2.0).all()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert all(torch.equal(parameter, original[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(1.0), r"EMA: decay is 1\.0; expected a number above 0 and below 1"),
        (lambda: EMA(0.0), r"EMA: decay is 0\.0"),
        (lambda: CheckpointAverage(0), "CheckpointAverage: k is 0; expected a whole number of at least 1"),
        (lambda: CheckpointAverage(2, 0), "CheckpointAverage: every is 0; expected a whole number of at least 1"),
    ],
)
def test_average_invalid_arguments_raise_config_error(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


class Snapshots(Progress):
    """Copies the model's state after every step."""

    def __init__(self, model):
        self.model = model
        self.states = []

    def on_step_end(self, step):
        self.states.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})


def weighted_mean(states, name):
    """Return the exponential moving average of a tensor, with the growing decay of `EMA(DECAY)`."""
    mean = states[0][name].double()
    for step, state in enumerate(states[1:], start=2):
        decay = min(DECAY, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * state[name]
    return mean


@pytest.mark.filterwarnings("ignore:.*lacks")  # a Sequential has no configuration
@pytest.mark.parametrize(
    ("average", "expected_mean"),
    [
        (EMA(DECAY), weighted_mean),
        (CheckpointAverage(k=2, every=3), lambda states, name: (states[2][name] + states[5][name].double()) / 2),
    ],
)
def test_average_of_batch_normalization_is_what_was_validated(tmp_path, average, expected_mean):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(23, 5, generator=generator)
    labels = (inputs.sum(1) > 0).long()
    data = DatasetSplit(TensorDataset(inputs, labels))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 2))
    snapshots = Snapshots(model)
    config = TrainConfig(steps=7, batch=FixedSize(6), averaging=average, device="cpu")
    trainer = Trainer(model, DatasetTask(data, data), config, str(tmp_path / "run"), progress=snapshots)
    trainer.run()
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = trainer.result()
    for name, tensor in result.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), expected_mean(snapshots.states, name), rtol=1e-5, atol=1e-6)
    n_batches = 7 if isinstance(average, EMA) else 6
    assert int(result["1.num_batches_tracked"]) == n_batches
    assert all(torch.equal(last[name], tensor) for name, tensor in snapshots.states[-1].items())
    model.load_state_dict(result)
    with torch.no_grad():
        loss = float(F.cross_entropy(model.eval()(inputs), labels))
    assert [row for row in read_log(tmp_path / "run") if row["kind"] == "valid"][-1]["loss"] == pytest.approx(loss)
