"""Train a tiny model with several processes and write the bytes that each process stores and sends.

    python -m tests.analysis.cost.processes FOLDER 2 4

Processes are forked from a parent that has imported everything and computed nothing, so that they start quickly.
Modules that training imports lazily are imported here for the same reason."""

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

from clearhead.analysis.inputs.example import example
from clearhead.models import tiny_decoder
from clearhead.training.distributed import DDP, FSDP, World


def n_bytes(tensors) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def counting(collective, counted):
    """Wrap a collective and add the smaller of its input and output, which is a shard."""

    def call(*args, **kwargs):
        names = ("output", "output_tensor", "input", "input_tensor")
        tensors = [*args[:2], *(kwargs[name] for name in names if name in kwargs)]
        outer = not counted["depth"]
        counted["shards"] += outer * min(t.numel() * t.element_size() for t in tensors)
        counted["depth"] += 1
        try:
            return collective(*args, **kwargs)
        finally:
            counted["depth"] -= 1

    return call


def work(rank: int, size: int, folder: Path) -> None:
    """Train with both strategies in one of `size` processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    counted: dict[str, int] = {}
    # torch 2.11 and later versions have different names; each process sends its shard with either.
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name), counted))
    for kind in ("ddp", "fsdp"):
        counted.update({"shards": 0, "reduced": 0, "depth": 0})
        stored = train(World(rank=rank, size=size, parallel=DDP() if kind == "ddp" else FSDP()), kind, counted)
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(stored | counted))
    dist.destroy_process_group()


def train(world: World, kind: str, counted: dict[str, int]) -> dict[str, int]:
    """Return the bytes that this process stores after a step."""
    model = tiny_decoder().build()
    sample = example(model, "Decoder", tokens=13, batch=2)
    shared = world.wrap(model)
    if kind == "ddp":

        def hook(state, bucket):
            counted["reduced"] += bucket.buffer().numel() * bucket.buffer().element_size()
            return allreduce_hook(None, bucket)

        shared.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(shared.parameters(), lr=1e-4, foreach=False)
    sample.loss(shared).backward()
    optimizer.step()
    states = [x for state in optimizer.state.values() for name, x in state.items() if name != "step"]
    return {
        "parameters": n_bytes(shared.parameters()),
        "gradients": n_bytes(p.grad for p in shared.parameters()),
        "optimizer": n_bytes(states),
    }


def main(folder: Path, *sizes: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for size in sizes:
        size_folder = folder / str(size)
        size_folder.mkdir()
        method = "fork" if hasattr(os, "fork") else "spawn"
        torch.multiprocessing.start_processes(work, (size, size_folder), nprocs=size, start_method=method)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
