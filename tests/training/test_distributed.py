"""Two gloo processes on the CPU, compared with one process on the joined batches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clearhead.data.sampler import Batches, TokenBudget
from clearhead.errors import ConfigError
from clearhead.training import FSDP, Recipe, train
from clearhead.training.distributed import choose_device, join
from tests.training.tiny import SETTINGS, rows
from tests.training.workers import PACKED, SHARED, write_pairs

ROOT = Path(__file__).parents[2]
WAYS = ["ddp", "fsdp"]


def half(source: Path, target: Path) -> Path:
    """Copy the run as of step 5 of 10."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "step-00000010")
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One process alone, then two by torchrun: the whole run, and the second half of one that one process began."""
    folder = tmp_path_factory.mktemp("distributed")
    torch.set_num_threads(1)
    train("sort-dedup", out=folder / "one", overrides=SHARED)
    train("translation", data=write_pairs(folder / "pairs.tsv"), out=folder / "packed-one", overrides=PACKED)
    for way in WAYS:
        half(folder / "one", folder / f"one-then-{way}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.training.workers", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def assert_same(run: Path, reference: Path) -> None:
    """The same rows and the same exported weights, to what float32 sums in another order allow."""
    for row, reference_row in zip(rows(run), rows(reference), strict=True):
        assert {name: row[name] for name in ("kind", "step")} == {
            name: reference_row[name] for name in ("kind", "step")
        }
        for name in set(row) - {"kind", "step"}:
            assert row[name] == pytest.approx(reference_row[name], rel=2e-5), (name, row, reference_row)
    parameters, reference_parameters = (load_file(path / "model/model.safetensors") for path in (run, reference))
    assert parameters.keys() == reference_parameters.keys()
    for name, tensor in parameters.items():
        # A key's bias adds the same to all scores of a query, so its gradient is zero but for rounding; Adam divides
        # that by its own size and walks on noise.
        if not name.endswith("k_proj.bias"):
            torch.testing.assert_close(tensor, reference_parameters[name], rtol=1e-4, atol=1e-5)


def test_batches_some_batch_has_no_row_for_a_process(folder):
    recipe = Recipe.load(folder / "one")
    batches = Batches(recipe.data.load(seed=0).train, TokenBudget(23), seed=0)
    first = batches.groups()[:20]  # ten updates of two batches
    assert any(len(group) == 1 for group in first)
    assert any(len(group) > 2 for group in first)


@pytest.mark.parametrize("way", WAYS)
def test_train_two_processes_log_the_losses_of_one(folder, way):
    assert_same(folder / way, folder / "one")


def test_train_two_processes_divide_packed_rows(folder):
    assert_same(folder / "packed", folder / "packed-one")


@pytest.mark.parametrize("way", WAYS)
def test_run_of_one_process_resumes_on_two(folder, way):
    assert_same(folder / f"one-then-{way}", folder / "one")


@pytest.mark.parametrize("way", WAYS)
def test_run_of_two_processes_resumes_on_one(folder, way):
    resumed = half(folder / way, folder / f"{way}-then-one")
    summary = train(resume=resumed)
    assert (summary.ending, summary.processes) == ("finished", 1)
    assert_same(resumed, folder / "one")


def test_fsdp_checkpoint_has_a_shard_per_process(folder):
    shards = sorted((folder / "fsdp/step-00000010/shards").iterdir())
    assert [path.name[:11] for path in shards] == ["shard-00001", "shard-00002"]
    sizes = [sum(tensor.numel() for name, tensor in load_file(path).items() if "exp_avg/" in name) for path in shards]
    total = json.loads((folder / "fsdp/summary.json").read_text())["n_parameters"]
    assert sum(sizes) == total  # every moment is stored once,
    assert min(sizes) > total / 3  # and about half of them by each
    assert not (folder / "fsdp/step-00000010/model.safetensors").exists()
    assert (folder / "ddp/step-00000010/model.safetensors").exists()


def test_full_disk_raises_storage_error_in_every_process(folder):
    messages = [(folder / f"full-{rank}.txt").read_text() for rank in range(2)]
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"cannot save a checkpoint to {folder}/full/step-00000005: File too large; ")
    assert not list((folder / "full").glob(".step-*"))


def test_join_fsdp_without_launcher_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS | {"parallel": FSDP()})


def test_choose_device_returns_or_raises():
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device is 'gpu'"):
        choose_device("gpu")
    with pytest.raises(ConfigError, match="whose tensors have no data"):
        choose_device("meta")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(ConfigError, match="finds no GPU"):
            choose_device("cuda")


def test_join_single_process_is_a_world_of_size_one():
    with join("cpu") as world:
        assert (world.rank, world.size, world.is_first, world.parallel) == (0, 1, True, None)
        assert world.all_reduce_max(5) == 5
        assert world.gather("x") == ["x"]
        assert world.broadcast("x") == "x"
