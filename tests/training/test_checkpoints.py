"""Checkpoints: reading equals writing, pruning, corrupted and invalid files."""

from __future__ import annotations

import json
import os
import shutil
import warnings

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from clearhead.errors import StorageError
from clearhead.training import checkpoint as checkpoints
from tests.support.faults import failing


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(5)
    return {
        "layer.weight": torch.randn(3, 5, generator=generator),
        "optimizer/exp_avg/layer.weight": torch.randn(3, 5, generator=generator),
        "optimizer/step/layer.weight": torch.tensor(7.0),
        "rng/0/cpu": torch.arange(11, dtype=torch.uint8),
    }


def write(run, step, tensors):
    return checkpoints.write(run, step, tensors, {"fingerprint": "mine", "number": 0.1})


def good(run, fingerprint="mine"):
    return list(checkpoints.valid_checkpoints(run, fingerprint=fingerprint))


def test_read_returns_what_was_written(tmp_path, tensors):
    folder = write(tmp_path, 123, tensors)
    assert folder.name == "step-00000123"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    (checkpoint,) = good(tmp_path)
    assert (checkpoint.step, checkpoint.state["number"]) == (123, 0.1)
    places = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoints.read(checkpoint, places)
    assert all(torch.equal(places[name], tensor) for name, tensor in tensors.items())


def test_checkpoint_files_contain_no_pickle(tmp_path, tensors):
    folder = write(tmp_path, 1, tensors)
    for path in folder.iterdir():
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
        else:
            header = int.from_bytes(content[:8], "little")  # safetensors: its length, a JSON header, the numbers
            json.loads(content[8 : 8 + header])


def test_valid_checkpoints_are_newest_first_and_prune_removes_the_oldest(tmp_path, tensors):
    for step in (3, 20, 100):
        write(tmp_path, step, tensors)
    assert [checkpoint.step for checkpoint in good(tmp_path)] == [100, 20, 3]
    checkpoints.prune(tmp_path, 2, at=100)
    assert [checkpoint.step for checkpoint in good(tmp_path)] == [100, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]


def _truncate(folder):
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _flip(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _edit(folder, **changes):
    state = json.loads((folder / "state.json").read_text()) | changes
    (folder / "state.json").write_text(json.dumps(state))
    _update_manifest(folder)


def _update_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest = {name: checkpoints.sha256(folder / name) for name in manifest}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "is corrupted: the SHA-256 of optimizer.safetensors differs"),
        (_flip, "is corrupted: the SHA-256 of model.safetensors differs"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is incomplete: model.safetensors is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "is incomplete: manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is invalid: manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "is not a clearhead checkpoint"),
        (_empty, "is incomplete: manifest.json is missing"),
        (lambda folder: _edit(folder, format="other 3"), "has format 'other 3'"),
        (lambda folder: _edit(folder, step=5), "has format .* step 5"),
        (
            lambda folder: _edit(folder, fingerprint="theirs"),
            "was written by a run with a different recipe",
        ),
    ],
)
def test_valid_checkpoints_warns_and_skips_invalid_checkpoints(tmp_path, tensors, damage, message):
    write(tmp_path, 3, tensors)
    damage(write(tmp_path, 7, tensors))
    with pytest.warns(RuntimeWarning, match=f"step-00000007 .*{message}.*previous checkpoint is used"):
        assert [checkpoint.step for checkpoint in good(tmp_path)] == [3]


def test_read_other_shapes_raises_storage_error(tmp_path, tensors):
    write(tmp_path, 3, tensors)
    (checkpoint,) = good(tmp_path)
    with pytest.raises(
        StorageError, match=r"does not fit: layer.weight is \(3, 5\), expected \(5, 3\); more is missing"
    ):
        checkpoints.read(checkpoint, {"layer.weight": torch.zeros(5, 3), "more": torch.zeros(2)})


@pytest.mark.parametrize(
    ("module", "function", "after"),
    [(safetensors.torch, "save_file", 0), (safetensors.torch, "save_file", 1), (os, "replace", 0)],
)
def test_write_interrupted_keeps_earlier_checkpoints(tmp_path, tensors, module, function, after):
    write(tmp_path, 3, tensors)
    with (
        failing(module, function, after=after),
        pytest.raises(StorageError, match="No space left on device; earlier checkpoints are intact"),
    ):
        write(tmp_path, 7, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [checkpoint.step for checkpoint in good(tmp_path)] == [3]
    checkpoints.prune(tmp_path, 5, at=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_write_same_step_replaces_the_checkpoint(tmp_path, tensors):
    write(tmp_path, 3, tensors)
    tensors["layer.weight"] = torch.full((3, 5), 2.0)
    write(tmp_path, 3, tensors)
    (checkpoint,) = good(tmp_path)
    place = torch.zeros(3, 5)
    checkpoints.read(checkpoint, {"layer.weight": place})
    assert place.eq(2.0).all()


def test_valid_checkpoints_of_missing_folder_is_empty(tmp_path):
    assert good(tmp_path / "nothing") == []


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_valid_checkpoints_skips_deeply_nested_json(tmp_path, tensors, name):
    write(tmp_path, 3, tensors)
    folder = write(tmp_path, 7, tensors)
    (folder / name).write_text("[" * 200_000)
    if name == "state.json":
        _update_manifest(folder)
    with pytest.warns(RuntimeWarning, match=f"step-00000007 .*{name} is not JSON"):
        assert [checkpoint.step for checkpoint in good(tmp_path)] == [3]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "stored",
    [None, 5, [], {"a": 5}, {"a": [3, "5"]}, {"a": [-1]}, {"a": [True]}, {"a": None}],
    ids=str,
)
def test_valid_checkpoints_skips_malformed_tensor_shapes(tmp_path, tensors, stored):
    write(tmp_path, 3, tensors)
    _edit(write(tmp_path, 7, tensors), tensors=stored)
    with pytest.warns(RuntimeWarning, match=r"step-00000007 .*state.json: tensors") as caught:
        assert [checkpoint.step for checkpoint in good(tmp_path)] == [3]
    assert all(len(str(warning.message)) < 400 for warning in caught)


@pytest.mark.bad_input
def test_valid_checkpoints_quotes_long_values_shortened(tmp_path, tensors):
    write(tmp_path, 3, tensors)
    _edit(write(tmp_path, 7, tensors), format="x" * 100_000)
    with pytest.warns(RuntimeWarning, match="step-00000007") as caught:
        good(tmp_path)
    assert all(len(str(warning.message)) < 400 for warning in caught)


@pytest.mark.bad_input
def test_read_rejects_a_file_whose_tensors_have_other_shapes(tmp_path, tensors):
    folder = write(tmp_path, 7, tensors)
    other = {"layer.weight": torch.zeros(1, 5)}  # would broadcast
    save_file(other, folder / "model.safetensors")
    _update_manifest(folder)
    (checkpoint,) = good(tmp_path)
    with pytest.raises(StorageError, match=r"model.safetensors.*layer.weight is \(1, 5\), expected \(3, 5\)"):
        checkpoints.read(checkpoint, {"layer.weight": torch.zeros(3, 5)})
