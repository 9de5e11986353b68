"""Processes that train a tiny model together and write down what they hold and what they send: so many, then so many.

    python -m tests.costs.processes FOLDER 2 4

They are forked from a process that has imported everything and computed nothing, so that each starts quickly. What
training imports late is imported here at once for the same reason."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from clearhead.checks.example import example
from clearhead.models import tiny_decoder
from clearhead.training.distributed import DDP, FSDP, World


def n_bytes(tensors) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def counting(real, counted):
    """Adds up the smaller of what a collective is given and gives: a shard."""

    def call(*args, **kwargs):
        names = ("output", "output_tensor", "input", "input_tensor")
        tensors = [*args[:2], *(kwargs[name] for name in names if name in kwargs)]
        outer = not counted["inside"]
        counted["shards"] += outer * min(t.numel() * t.element_size() for t in tensors)
        counted["inside"] += 1
        try:
            return real(*args, **kwargs)
        finally:
            counted["inside"] -= 1

    return call


def work(rank: int, size: int, folder: Path) -> None:
    """All that one of `size` processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    counted: dict[str, int] = {}
    # One name is of torch 2.11, the other of later ones; each process sends its shard, whichever way it goes.
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name), counted))
    for kind in ("ddp", "fsdp"):
        counted.update({"shards": 0, "reduced": 0, "inside": 0})
        held = train(World(rank=rank, size=size, parallel=DDP() if kind == "ddp" else FSDP()), kind, counted)
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(held | counted))
    dist.destroy_process_group()


def train(world: World, kind: str, counted: dict[str, int]) -> dict[str, int]:
    """What this process holds after a step."""
    model = tiny_decoder().build()
    given = example(model, "Decoder", tokens=13, batch=2)
    shared = world.share(model)
    if kind == "ddp":

        def hook(state, bucket):
            counted["reduced"] += bucket.buffer().numel() * bucket.buffer().element_size()
            return allreduce_hook(None, bucket)

        shared.register_comm_hook(None, hook)
    optimiser = torch.optim.AdamW(shared.parameters(), lr=1e-4, foreach=False)
    given.loss(shared).backward()
    optimiser.step()
    states = [x for state in optimiser.state.values() for name, x in state.items() if name != "step"]
    return {
        "weights": n_bytes(shared.parameters()),
        "gradients": n_bytes(p.grad for p in shared.parameters()),
        "optimiser": n_bytes(states),
    }


def main(folder: Path, *sizes: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for size in sizes:
        place = folder / str(size)
        place.mkdir()
        method = "fork" if hasattr(os, "fork") else "spawn"
        torch.multiprocessing.start_processes(work, (size, place), nprocs=size, start_method=method)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
