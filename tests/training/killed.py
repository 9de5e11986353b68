"""Run by `test_interrupted_runs.py` in a separate process: train, be killed ten times, resume each time, and finish.

    python -m tests.training.killed FOLDER SEED

Children are forked from a process that has imported everything, including late imports of training, so that they start
quickly. Each child is terminated by SIGKILL after a random number of steps and then of function calls: within a step, a
validation or a checkpoint. The positions depend on the seed only, not on time."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo

from clearhead.training import Progress, train
from tests.training.tiny import SETTINGS

KILLS = 10
MOST_STEPS = 6
MOST_CALLS = 30_000  # a step makes about 5,000 of them, a checkpoint about 28,000
LONG = SETTINGS | {
    "steps": 90,
    "dropout": 0.2,
    "log_every": 2,
    "eval_every": 13,
    "checkpoint_every": 5,
    "averaging": '{type = "EMA", decay = 0.9}',
    "keep_best": True,
}


class Doomed(Progress):
    """Kill the process after `steps` steps and then `calls` function calls."""

    def __init__(self, steps: int, calls: int) -> None:
        self.steps, self.calls = steps, calls

    def on_step_end(self, step: int) -> None:
        self.steps -= 1
        if self.steps == 0:
            sys.setprofile(self._called)

    def _called(self, frame: object, event: str, argument: object) -> None:
        self.calls -= 1
        if self.calls <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def start(folder: Path, progress: Progress | None) -> int:
    """Train or resume in a child process and return its exit code, negative after a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        torch.set_num_threads(1)
        if (folder / "train.toml").exists():
            train(resume=folder, progress=progress)
        else:
            train("sort-dedup", out=folder, overrides=LONG, progress=progress)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    folder, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    warnings.simplefilter("error")  # a kill must not leave an incomplete checkpoint
    fates = [Doomed(rng.randint(1, MOST_STEPS), rng.randint(1, MOST_CALLS)) for _ in range(KILLS)]
    kills = sum(start(folder, fate) == -signal.SIGKILL for fate in fates)
    print(f"kills {kills} status {start(folder, None)}")


if __name__ == "__main__":
    main()
