"""Only one process trains in a folder: errors of the second process, and locks of killed processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.errors import ConfigError, StorageError
from clearhead.training import train
from clearhead.training.distributed import World
from clearhead.training.run_lock import run_lock
from tests.training.tiny import SETTINGS, rows

ROOT = Path(__file__).parents[2]

# Trains until its first checkpoint, says so, and waits to be killed.
WAITING = """
import sys, time
from clearhead.training import Progress, train

class Wait(Progress):
    def on_save(self, step, folder):
        print("saved", step, flush=True)
        time.sleep(600)

train(resume=sys.argv[1], progress=Wait())
"""


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def run(tmp_path):
    """A run that has made three of its eleven steps."""

    class _Stop(Exception):
        pass

    from clearhead.training import Progress

    class _Stopping(Progress):
        def on_save(self, step, folder):
            raise _Stop

    with pytest.raises(_Stop):
        train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS, progress=_Stopping())
    return tmp_path / "run"


@pytest.fixture
def holder(run):
    """Another process that trains in the folder and holds it."""
    command = [sys.executable, "-c", WAITING, str(run)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "saved 6\n"
        yield child
        child.kill()


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_run_lock_second_process_raises_and_changes_nothing(run, holder):
    before = files(run)
    command = [sys.executable, "-m", "clearhead.cli", "train", "--resume", str(run)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    who = f"process {holder.pid} on {socket.gethostname()} since "
    assert done.stderr.startswith(f"clearhead: {run} is being trained by {who}")
    assert done.stderr.endswith("; wait for its end, stop it, or train in another folder\n")
    assert len(done.stderr.splitlines()) == 1
    assert files(run) == before


def test_run_lock_is_released_when_the_process_is_killed(run, holder, tmp_path):
    with pytest.raises(StorageError, match=f"process {holder.pid} on"):
        train(resume=run)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert json.loads((run / ".lock").read_text())["pid"] == holder.pid  # the name is there, the lock is not
    train(resume=run)
    train("sort-dedup", out=tmp_path / "whole", overrides=SETTINGS)
    assert rows(run) == rows(tmp_path / "whole")


def test_train_new_run_locks_its_folder(tmp_path):
    with run_lock(tmp_path / "run", World()), pytest.raises(StorageError, match=f"process {os.getpid()} on"):
        train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS)
    train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS)
    with pytest.raises(ConfigError, match="already contains a run"):
        train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS)


def test_run_lock_only_the_first_process_locks(tmp_path):
    with run_lock(tmp_path, World()), run_lock(tmp_path, _Second()):
        pass
    with (
        run_lock(tmp_path, World()),
        pytest.raises(StorageError, match="is being trained by"),
        run_lock(tmp_path, World()),
    ):
        pass


class _Second(World):
    """The second of two processes, which receives the result of the lock from the first."""

    is_first = False

    def broadcast(self, value):
        return None


def test_run_lock_unsupported_file_system_warns(tmp_path):
    def no_locks(file):
        raise OSError(95, "Operation not supported")

    with (
        pytest.warns(RuntimeWarning, match=r"cannot be locked \(Operation not supported\)"),
        run_lock(tmp_path, World(), lock=no_locks),
    ):
        pass
