"""Distributed training: process rank, collectives, and DDP or FSDP.

`torchrun` starts the processes and sets their environment variables. A single process is a world of size 1, so the loop
is written once. Every batch is divided among the processes by rows, losses are sums, and divisors are counts over all
processes, so the results do not depend on the number of processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class DDP:
    """Replicate the model in every process, divide each batch, and average the gradients."""


@dataclass(frozen=True)
class FSDP:
    """Shard parameters, gradients and optimizer state over the processes (FSDP2), and gather them block by block.

    Sharding replaces the classes and parameters of modules, so `Trainer` shards a copy of the model that it gets."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank, size and device of a process of the run, and its collectives."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    parallel: DDP | FSDP | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum over all processes."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number)  # on the CPU, with gloo, so that no GPU is synchronized
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return the value of the first process."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP or FSDP."""
        if self.parallel is None:
            return model
        if isinstance(self.parallel, DDP):
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        for block in transformer_blocks(model):
            fully_shard(block, mesh=mesh)
        # Also after the last forward pass: a gathered copy must not hide parameters that change between steps.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        return model

    def no_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for one backward pass of an update that reduces gradients only in the last one."""
        if isinstance(self.parallel, FSDP):
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif isinstance(model, nn.parallel.DistributedDataParallel) and not last:
            without_sync: AbstractContextManager[None] = model.no_sync()
            return without_sync
        return nullcontext()


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of all the model's stacks: the units of compilation, sharding and recomputation."""
    return [block for module in model.modules() for block in getattr(module, "blocks", ())]


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every process (all must call it)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def copy_on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the model on a device, without a second copy on the model's own."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        copied = nn.Parameter(parameter.detach().to(device, copy=True), parameter.requires_grad)
        memo[id(parameter)] = copied
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(device, copy=True)
    return copy.deepcopy(model, memo)


@torch.no_grad()
def copy_full_tensors(source: nn.Module, target: nn.Module | None) -> None:
    """Copy the full parameters and buffers of a sharded copy to the original model, if this process still has it.

    All processes must call it."""
    targets = {} if target is None else dict(target.named_parameters()) | dict(target.named_buffers())
    for name, tensor in (*source.named_parameters(), *source.named_buffers()):
        full = full_tensor(tensor.detach())
        if name in targets:
            targets[name].copy_(full)


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, sharing its memory, or the tensor itself if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_launched() -> bool:
    """Return whether a launcher such as torchrun started this process."""
    return dist.is_initialized() or ("WORLD_SIZE" in os.environ and "RANK" in os.environ)


@contextmanager
def join(device: str = "auto", parallel: DDP | FSDP | None = None) -> Iterator[World]:
    """Enter the world of this process. A process group that it creates is destroyed after the block."""
    launched = is_launched()
    size = int(os.environ.get("WORLD_SIZE", 1)) if launched else 1
    if isinstance(parallel, FSDP) and not launched:
        raise ConfigError(
            "parallel is FSDP, which needs a process group; start the command with "
            "`torchrun --nproc-per-node N -m clearhead …`, or leave parallel out"
        )
    target = choose_device(device, int(os.environ.get("LOCAL_RANK", 0)) if launched else None)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    owns_group = not dist.is_initialized() and (size > 1 or isinstance(parallel, FSDP))
    if owns_group:
        # Two backends: tensors are reduced on the GPUs, counts and flags on the CPU without synchronizing a GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if target.type == "cuda" else "gloo")
    try:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if not isinstance(parallel, FSDP):
            parallel = DDP() if size > 1 else None  # DDP of one process is the plain model
        yield World(rank=rank, size=size, device=target, parallel=parallel)
    finally:
        if owns_group:
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device of a name; "auto" is a GPU if available, and each process has its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device is {name!r}; expected "auto", "cpu", "cuda" or "cuda:1"') from error
    if device.type == "meta":
        raise ConfigError('device is "meta", whose tensors have no data; use "cpu", "cuda" or "auto"')
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f'device is {name!r}, but torch finds no GPU; use "cpu" or "auto"')
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device() if local_rank is None else local_rank)
    return device
