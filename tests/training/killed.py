"""Run by `test_kill.py` in a process of its own: trains, kills the training ten times, resumes, and finishes.

    python -m tests.training.killed FOLDER SEED

Children are forked from a process that has imported everything and computed nothing, so that ten of them start quickly.
What training imports late is imported here at once for the same reason. Each child is ended by SIGKILL, which no
program can catch, at a random place after the log shows some progress."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo

from clearhead.training import train
from tests.training.tiny import SETTINGS

KILLS = 10
LONG = SETTINGS | {
    "steps": 90,
    "dropout": 0.2,
    "log_every": 2,
    "eval_every": 13,
    "checkpoint_every": 5,
    "averaging": '{type = "EMA", decay = 0.9}',
    "keep_best": True,
}


def start(folder: Path) -> int:
    """Train or resume in a child; its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        if (folder / "train.toml").exists():
            train(resume=folder)
        else:
            train("sort-dedup", out=folder, set=LONG)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def rows_written(folder: Path) -> int:
    path = folder / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_somewhere(folder: Path, chance: random.Random) -> bool:
    """Let a child run a little and kill it; False if it was done before that."""
    child = start(folder)
    at_start = rows_written(folder)
    enough = chance.randint(1, 4)
    time.sleep(0.02)  # a resumed child first drops rows
    while True:
        done, _ = os.waitpid(child, os.WNOHANG)
        if done:
            return False
        if rows_written(folder) >= max(1, min(at_start, rows_written(folder)) + enough):
            break
        time.sleep(0.0005)
    time.sleep(chance.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def main() -> None:
    folder, chance = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    warnings.simplefilter("error")  # a kill must not even leave a torn checkpoint behind
    kills = sum(kill_somewhere(folder, chance) for _ in range(KILLS))
    _, status = os.waitpid(start(folder), 0)
    print(f"kills {kills} status {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
