"""One run on one process or on many: who this one is, what they tell each other, how the model is shared out.

`torchrun` starts the processes and says by environment variables which is which. A run alone is a world of one, so the
loop is written once. Every batch is divided among the processes row by row, losses are sums and divisors are counts
over all processes, so the numbers do not depend on how many there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.errors import ConfigError


@dataclass(frozen=True)
class DDP:
    """Every process has the whole model and a part of each batch; gradients are averaged."""


@dataclass(frozen=True)
class FSDP:
    """Weights, gradients and optimiser state are divided among the processes (FSDP2), gathered block by block."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, as one of them sees it."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    parallel: DDP | FSDP | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and talks to people."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, number: int) -> int:
        """The largest of the numbers that the processes have."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number)  # on the CPU: gloo carries it, and no GPU is waited for
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def gather(self, value: Any) -> list[Any]:
        """What every process has, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """What the first process has."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as this world trains it. Parameters keep their names, under `inner` where it is wrapped."""
        if self.parallel is None:
            return model
        if isinstance(self.parallel, DDP):
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        # Also after the last forward pass: a gathered copy must not hide weights that are changed between steps.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        return model

    def no_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around each backward pass of one update: gradients travel between processes in the last one only."""
        if isinstance(self.parallel, FSDP):
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif isinstance(self.parallel, DDP) and not last:
            return model.no_sync()  # type: ignore[operator]
        return nullcontext()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of all the model's stacks: what is compiled, gathered and recomputed one at a time."""
    return [block for module in model.modules() for block in getattr(module, "blocks", ())]


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together on every process (all must call it); any other tensor as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; a tensor that is not sharded is its own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several (or of one)."""
    return dist.is_initialized() or ("WORLD_SIZE" in os.environ and "RANK" in os.environ)


@contextmanager
def join(device: str = "auto", parallel: DDP | FSDP | None = None) -> Iterator[World]:
    """The world that this process was started into. A process group that it starts is ended with the block."""
    launched = is_launched()
    size = int(os.environ.get("WORLD_SIZE", 1)) if launched else 1
    if isinstance(parallel, FSDP) and not launched:
        raise ConfigError(
            "parallel is FSDP, which needs processes to divide the model among; start the command with "
            "`torchrun --nproc-per-node N -m clearhead …`, or leave parallel out"
        )
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", 0)) if launched else None)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    is_ours = not dist.is_initialized() and (size > 1 or isinstance(parallel, FSDP))
    if is_ours:
        # Two back ends: tensors travel from GPU to GPU, plain counts and flags from CPU to CPU without waiting for one.
        dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    try:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if not isinstance(parallel, FSDP):
            parallel = DDP() if size > 1 else None  # DDP of one process is that process
        yield World(rank=rank, size=size, device=chosen, parallel=parallel)
    finally:
        if is_ours:
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device that a name stands for: "auto" is a GPU where there is one, and each process's own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device: got {name!r}, expected "auto", "cpu", "cuda" or "cuda:1"') from error
    if device.type == "meta":
        raise ConfigError('device: got "meta", where tensors have no numbers to train; use "cpu", "cuda" or "auto"')
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f'device: got {name!r}, but torch sees no GPU here; use "cpu" or "auto"')
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device() if local_rank is None else local_rank)
    return device
