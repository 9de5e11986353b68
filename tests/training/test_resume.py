"""A run that is resumed equals one that was not interrupted, whatever happened to its checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.errors import StorageError
from clearhead.training import checkpoint, train
from tests.training.tiny import SETTINGS, At, assert_same_run, final, rows


def run(folder, **settings):
    return train("sort-dedup", out=folder, overrides=SETTINGS | settings)


def cut(source, target, step):
    """The run as a kill would have left it after the checkpoint of `step`."""
    shutil.copytree(source, target)
    for path in target.glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    shutil.rmtree(target / "model")
    return target


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dropout": 0.2, "averaging": '{type = "EMA", decay = 0.9}'},
        {
            "dropout": 0.2,
            "averaging": '{type = "CheckpointAverage", k = 2, every = 2}',
            "keep_best": True,
            "accumulation": 2,
        },
        {"log_every": 4, "precision": "bf16"},
    ],
)
def test_resumed_run_is_bit_identical_to_uninterrupted(tmp_path, settings):
    run(tmp_path / "whole", keep=9, **settings)
    for step in (3, 9):
        part = cut(tmp_path / "whole", tmp_path / f"from-{step}", step)
        summary = train(resume=part)
        assert summary.ending == "finished"
        assert_same_run(tmp_path / "whole", part)


def test_resume_skips_an_incomplete_checkpoint_with_a_warning(tmp_path):
    run(tmp_path / "whole", keep=9)
    part = cut(tmp_path / "whole", tmp_path / "part", 9)
    (part / "step-00000009/optimizer.safetensors").write_bytes(b"torn")
    with (part / "log.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 9')  # a kill in the middle of a line
    with pytest.warns(RuntimeWarning, match="step-00000009 is corrupted"):
        train(resume=part)
    assert_same_run(tmp_path / "whole", part)


def test_resume_without_checkpoint_restarts(tmp_path):
    run(tmp_path / "whole")
    train(resume=cut(tmp_path / "whole", tmp_path / "part", 0))
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_resume_without_valid_checkpoint_raises_storage_error(tmp_path):
    run(tmp_path / "run")
    for path in (tmp_path / "run").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    with (
        pytest.warns(RuntimeWarning, match="corrupted"),
        pytest.raises(StorageError, match="has no valid checkpoint"),
    ):
        train(resume=tmp_path / "run")


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    run(tmp_path / "run")
    before, log = final(tmp_path / "run"), rows(tmp_path / "run")
    summary = train(resume=tmp_path / "run")
    assert (summary.ending, summary.steps) == ("finished", 11)
    assert rows(tmp_path / "run") == log
    assert all(torch.equal(before[name], tensor) for name, tensor in final(tmp_path / "run").items())


CRAFTED = {
    "no standing": lambda state: state.pop("trainer"),
    "standing is a list": lambda state: state.update(trainer=[1]),
    "unknown standing": lambda state: state["trainer"].update(more=1),
    "missing standing": lambda state: state["trainer"].pop("tokens"),
    "text for a number": lambda state: state["trainer"].update(tokens="many"),
    "another step": lambda state: state["trainer"].update(step=5),
    "no data": lambda state: state.pop("data"),
    "data is a number": lambda state: state.update(data=3),
    "text for an epoch": lambda state: state["data"].update(epoch="first"),
    "a huge epoch": lambda state: state["data"].update(epoch=10**40),
    "a negative position": lambda state: state["data"].update(position=-1),
    "other data": lambda state: state["data"].update(examples=5),
    "unknown average": lambda state: state["tensors"].update({"average/none": [3]}),
    "missing weight": lambda state: state["tensors"].pop("embedding.weight"),
    "a huge generator": lambda state: state["tensors"].update({"rng/0/cpu": [10**13]}),
    "infinitely many": lambda state: state["trainer"].update(step=10**30),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", CRAFTED)
def test_resume_skips_a_crafted_checkpoint_whose_hash_matches(tmp_path, name):
    run(tmp_path / "whole", keep=9)
    part = cut(tmp_path / "whole", tmp_path / "part", 9)
    folder = part / "step-00000009"
    state = json.loads((folder / "state.json").read_text())
    CRAFTED[name](state)
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = checkpoint.sha256(folder / "state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.warns(RuntimeWarning, match="step-00000009 .*the previous checkpoint is used"):
        train(resume=part)
    assert_same_run(tmp_path / "whole", part)


@pytest.mark.bad_input
def test_resume_skips_a_checkpoint_with_an_invalid_generator_state(tmp_path):
    run(tmp_path / "whole", keep=9)
    part = cut(tmp_path / "whole", tmp_path / "part", 9)
    path = part / "step-00000009/rng.safetensors"
    save_file({name: torch.full_like(tensor, 255) for name, tensor in load_file(path).items()}, path)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest[path.name] = checkpoint.sha256(path)
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    with pytest.warns(RuntimeWarning, match="step-00000009 .*the previous checkpoint is used"):
        train(resume=part)
    assert_same_run(tmp_path / "whole", part)


def test_resume_with_other_data_raises(tmp_path):
    run(tmp_path / "run")
    text = (tmp_path / "run/train.toml").read_text()
    (tmp_path / "run/train.toml").write_text(text.replace("n_train = 97", "n_train = 101"))
    with pytest.warns(RuntimeWarning, match="different recipe or different data"), pytest.raises(StorageError):
        train(resume=tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_prints_the_resume_command(tmp_path, number):
    run(tmp_path / "whole", dropout=0.2, log_every=3)
    before = signal.getsignal(number)
    summary = train(
        "sort-dedup",
        out=tmp_path / "part",
        overrides=SETTINGS | {"dropout": 0.2, "log_every": 3},
        progress=At(7, lambda: os.kill(os.getpid(), number)),
    )
    assert signal.getsignal(number) is before
    assert (summary.ending, summary.steps, summary.model) == ("interrupted", 7, None)
    assert summary.message.startswith(f"{number.name} received: saved after step 7 of 11. Resume with: ")
    assert summary.message.endswith(f"clearhead train --resume {tmp_path / 'part'}")
    assert train(resume=tmp_path / "part").ending == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_prune_does_not_count_corrupted_checkpoints(tmp_path):
    def stopped(step, **options):
        return train(**options, progress=At(step, lambda: os.kill(os.getpid(), signal.SIGINT)))

    run(tmp_path / "whole")
    stopped(9, task="sort-dedup", out=tmp_path / "part", overrides=SETTINGS)
    (tmp_path / "part/step-00000009/model.safetensors").write_bytes(b"torn")
    with pytest.warns(RuntimeWarning, match="is corrupted"):
        stopped(7, resume=tmp_path / "part", overrides={"keep": 1})
    assert [path.name for path in (tmp_path / "part").glob("step-*")] == ["step-00000007"]
    train(resume=tmp_path / "part")
    assert_same_run(tmp_path / "whole", tmp_path / "part")
