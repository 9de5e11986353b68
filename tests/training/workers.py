"""Run by `test_distributed.py` under torchrun, once in each of two processes.

    torchrun --nproc-per-node 2 -m tests.training.workers FOLDER

Trains with DDP and with FSDP2, and resumes runs that a single process started.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from clearhead.errors import StorageError
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

# Rows of several pairs, an odd number of them: one process has a row more than the other.
PACKED = {
    "batch": {"type": "SequencePacking", "rows": 3, "width": 31},
    "data.vocab_size": 283,
    "max_tokens": 29,
    "d_model": 12,
    "n_heads": 3,
    "d_ff": 13,
    "n_encoder_layers": 1,
    "n_decoder_layers": 1,
    "dropout": 0.0,
    "steps": 7,
    "warmup_steps": 2,
    "log_every": 1,
    "eval_every": 7,
    "checkpoint_every": 7,
    "device": "cpu",
}


def write_pairs(path: Path) -> Path:
    """131 pairs, most of them different in length."""
    path.write_text("".join(f"say {n}\t{'di ' * (n % 5)}{n * 7 % 131}\n" for n in range(131)), encoding="utf-8")
    return path


def fill_the_disk(folder: Path) -> None:
    """No file of a sharded checkpoint finds room; what each process then says is left in a file."""
    sys.dont_write_bytecode = True  # half of it would be written
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))
    try:
        train("sort-dedup", out=folder / "full", overrides=SHARED | {"parallel": FSDP()})
    except StorageError as error:
        (folder / f"full-{dist.get_rank()}.txt").write_text(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, parallel in (("ddp", DDP()), ("fsdp", FSDP())):
        summary = train("sort-dedup", out=folder / name, overrides=SHARED | {"parallel": parallel})
        assert summary.processes == 2, summary
        train(resume=folder / f"one-then-{name}", overrides={"parallel": parallel})
    train("translation", data=folder / "pairs.tsv", out=folder / "packed", overrides=PACKED)
    fill_the_disk(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
