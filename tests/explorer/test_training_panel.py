"""The training actions on a small run: its log, the frames of its checkpoints, and names that are not checkpoints."""

from __future__ import annotations

import base64
import threading

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.explorer.request import ModelRegistry, RequestContext
from clearhead.explorer.worker_pool import ServerLimits
from clearhead.training import checkpoint, checkpoint_tensors
from clearhead.training.recipe import Recipe, load_checkpoint_at
from tests.support.training_run import train_letters


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return train_letters(tmp_path_factory.mktemp("runs") / "letters")


@pytest.fixture(scope="module")
def registry(run_folder):
    return ModelRegistry([str(run_folder)], ServerLimits())


@pytest.fixture(scope="module")
def call(registry):
    """A function that runs an action."""
    context = RequestContext(registry, lambda *_: None, threading.Event())
    return lambda action, **fields: registry.run(action, fields, context)


@pytest.fixture(scope="module")
def sorted_letters(call):
    run = call("run", model="letters", text="D A C", complete=True)
    return {"ids": run["ids"], "n_prompt": run["n_prompt"]}


def test_training_log_returns_checkpoints_and_losses(call, run_folder):
    log = call("training_log", model="letters")
    assert log["steps"] == [3, 6, 9, 12]
    assert [step for step, _ in log["valid"]] == [3, 6, 9, 12]
    assert log["is_finished"]
    (model,) = call("models")["models"]
    assert model["checkpoints"] == ["letters@3", "letters@6", "letters@9", "letters@12"]


def test_training_frame_returns_the_weights_of_the_checkpoint(call, run_folder, sorted_letters):
    frame = call("training_frame", model="letters@3", **sorted_letters)
    model = load_checkpoint_at(run_folder, 3)
    stored = checkpoint.open_at(run_folder, 3)
    expected = {name: torch.empty_like(tensor) for name, tensor in checkpoint_tensors.weights(model).items()}
    checkpoint.read(stored, expected)
    for name, tensor in checkpoint_tensors.weights(model).items():
        assert torch.equal(tensor, expected[name]), name
    map_ = frame["maps"][0]
    n = len(sorted_letters["ids"])
    codes = torch.frombuffer(bytearray(base64.b64decode(map_["codes"])), dtype=torch.uint8)
    weights = (codes.view(map_["n_heads"], *map_["size"]).float() / 255) ** 2
    torch.testing.assert_close(weights.sum(-1), torch.ones(map_["n_heads"], map_["size"][0]), atol=0.02 * n, rtol=0)
    with torch.no_grad():
        log_probs = model(torch.tensor([sorted_letters["ids"]]))[0].log_softmax(-1)
    start = sorted_letters["n_prompt"]
    losses = [-float(log_probs[i - 1, sorted_letters["ids"][i]]) for i in range(start, n)]
    assert frame["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_checkpoints_can_be_compared(call, sorted_letters):
    pair = {"first": {"model": "letters", **sorted_letters}, "second": {"model": "letters@3", **sorted_letters}}
    streams = call("compare_streams", **pair)["stacks"][0]
    assert max(value for row in streams["difference"] for value in row) > 0


def test_registry_keeps_few_checkpoints_loaded(registry):
    loaded = {step: registry.model(f"letters@{step}").model for step in (3, 6, 9, 12)}
    assert registry.model("letters@12").model is loaded[12]
    assert registry.model("letters@3").model is not loaded[3]  # the least recently used one was dropped
    assert registry.model("letters").name == "letters"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("letters@5", "no checkpoint of step 5"),
        ("letters@", "unknown model"),
        ("letters@-4", "unknown model"),
        ("letters@../4", "unknown model"),
        ("letters@" + "9" * 40, "unknown model"),
        ("other@3", "unknown model"),
    ],
)
def test_names_that_are_not_checkpoints_are_rejected(registry, name, message):
    with pytest.raises(ClearheadError, match=message):
        registry.model(name)


def test_load_checkpoint_at_differs_from_the_result_of_the_run(run_folder):
    first, last = (load_checkpoint_at(run_folder, step).state_dict() for step in (3, 12))
    assert first.keys() == last.keys() == Recipe.load(run_folder).model.build().state_dict().keys()
    assert any(not torch.equal(first[name], last[name]) for name in first)
