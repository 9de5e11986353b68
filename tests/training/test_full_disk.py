"""A full disk: one error message, intact earlier checkpoints, and a run that can be resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clearhead.errors import StorageError
from clearhead.training import Progress, train
from clearhead.training.checkpoint import valid_checkpoints
from tests.training.tiny import SETTINGS, rows

ROOT = Path(__file__).parents[2]
MAX_FILE_BYTES = 4_000  # enough for the log, the recipe and the tokenizer, not for the parameters


class _FullAfter(Progress):
    """Fill the disk after the checkpoint of a step is saved."""

    def __init__(self, step: int, limit) -> None:
        self.step, self.limit = step, limit

    def on_save(self, step: int, folder: Path) -> None:
        if step == self.step:
            self.limit.__enter__()


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(checkpoint.step for checkpoint in valid_checkpoints(folder))


def test_run_on_full_disk_resumes_to_equal_results(tmp_path, small_disk):
    settings = SETTINGS | {"log_every": 5}
    train("sort-dedup", out=tmp_path / "easy", overrides=settings)
    limit, run = small_disk(MAX_FILE_BYTES), tmp_path / "full"
    try:
        with pytest.raises(
            StorageError, match=r"cannot save a checkpoint to .*step-00000009: File too large; .*resume$"
        ):
            train("sort-dedup", out=run, overrides=settings, progress=_FullAfter(6, limit))
    finally:
        limit.__exit__(None, None, None)
    assert checkpoint_steps(run) == [3, 6]
    assert not list(run.glob(".step-*"))

    command = [sys.executable, "-m", "clearhead.cli", "train", "--resume", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with small_disk(MAX_FILE_BYTES):  # a child has the limits of its parent
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("clearhead: cannot save a checkpoint to ")
    assert checkpoint_steps(run) == [3, 6]
    assert not list(run.glob(".step-*"))

    train(resume=run)
    assert rows(run) == rows(tmp_path / "easy")
    actual, expected = (load_file(folder / "model" / "model.safetensors") for folder in (run, tmp_path / "easy"))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_log_on_full_disk_raises_storage_error(tmp_path, small_disk):
    settings = SETTINGS | {"steps": 40, "checkpoint_every": 100, "eval_every": 100}
    with (
        small_disk(2_500),
        pytest.raises(StorageError, match=r"cannot write to .*log.jsonl: File too large; free some space"),
    ):
        train("sort-dedup", out=tmp_path / "run", overrides=settings)
    train(resume=tmp_path / "run")
    train("sort-dedup", out=tmp_path / "easy", overrides=settings)
    assert rows(tmp_path / "run") == rows(tmp_path / "easy")


@pytest.mark.usefixtures("drawn")
@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_run_files_follow_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path): path.stat().st_mode & 0o777 for path in files} == {
        path.relative_to(tmp_path): 0o644 for path in files
    }
    assert {"train.toml", "log.jsonl", "tokenizer.json", "optimizer.safetensors"} <= {path.name for path in files}
