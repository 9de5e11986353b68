"""Run by `test_distributed.py` under torchrun, once in each of two processes.

    torchrun --nproc-per-node 2 -m tests.training.workers FOLDER

Trains with DDP and with FSDP2, and goes on with runs that one process has begun.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from clearhead.training import DDP, FSDP, train
from tests.training.tiny import SETTINGS

# A budget that some rows fill alone: then one of two processes has no row and takes part with weight zero.
SHARED = SETTINGS | {
    "batch.budget": 23,
    "steps": 10,
    "accumulation": 2,
    "checkpoint_every": 5,
    "keep": 9,
    "averaging": '{type = "EMA", decay = 0.8}',
    "keep_best": True,
}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, parallel in (("ddp", DDP()), ("fsdp", FSDP())):
        summary = train("sort-dedup", out=folder / name, set=SHARED | {"parallel": parallel})
        assert summary.processes == 2, summary
        train(resume=folder / f"one-then-{name}", set={"parallel": parallel})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
