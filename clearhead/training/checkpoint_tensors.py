"""The named tensors of a checkpoint: parameters, optimizer state, averages and random generators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from clearhead._core import counter_rng
from clearhead.errors import StorageError
from clearhead.models import storage
from clearhead.training.checkpoint import Checkpoint, read
from clearhead.training.distributed import World

_ADAMW_STATE = ("exp_avg", "exp_avg_sq", "step")
_DROPOUT = 503


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return each parameter once, by its first name, and the persistent buffers."""
    return {names[0]: tensor for names, tensor in storage.named_tensors(model)}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return AdamW's state, by the names of the parameters."""
    return {
        f"optimizer/{part}/{name}": optimizer.state[parameter][part]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for part in _ADAMW_STATE
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint) -> None:
    """Restore AdamW's state from a checkpoint. A parameter without stored state gets none."""
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if f"optimizer/step/{name}" not in checkpoint.tensors:
            optimizer.state.pop(parameter, None)
            continue
        step = torch.zeros((), device=parameter.device if optimizer.defaults.get("fused") else "cpu")
        state = {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimizer.state[parameter] = state
        targets |= {f"optimizer/{part}/{name}": tensor.detach() for part, tensor in state.items()}
    read(checkpoint, targets)


def seed(run_seed: int, world: World, step: int = 0) -> None:
    """Seed the generators of this process (dropout), differently for each step and rank."""
    torch.manual_seed(int(counter_rng.random_bits(_DROPOUT, run_seed, step, world.rank)) & (2**63 - 1))


def rng_tensors(world: World) -> dict[str, Tensor]:
    """Return the states of the generators of all processes; all must call it."""
    local_states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        local_states["cuda"] = torch.cuda.get_rng_state(world.device)
    by_rank = enumerate(world.gather(local_states))
    return {f"rng/{rank}/{kind}": state for rank, states in by_rank for kind, state in states.items()}


def restore_rng(checkpoint: Checkpoint, world: World, run_seed: int) -> None:
    """Restore the generators of this process; seed them if the checkpoint has no state for its rank."""
    seed(run_seed, world, checkpoint.step)
    states = {f"rng/{world.rank}/cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rng/{world.rank}/cuda"] = torch.cuda.get_rng_state(world.device)
    states = {name: torch.empty_like(state) for name, state in states.items() if name in checkpoint.tensors}
    read(checkpoint, states)
    for name, state in states.items():
        try:
            if name.endswith("/cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, world.device)
        except RuntimeError as error:
            raise StorageError(f"checkpoint {checkpoint.folder} is invalid: {name} is not a generator state") from error


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a prefix before their names."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def empty_like_weights(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return empty tensors, sharded like the parameters, for parameter names with or without a prefix."""
    parameter_names = {name: name if name in weights else name.partition("/")[2] for name in names}
    return {name: torch.empty_like(weights[parameter_name]) for name, parameter_name in parameter_names.items()}


def read_prefixed(prefix: str, checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors that were stored with a prefix, which have the shapes of the parameters."""
    names = [name.removeprefix(f"{prefix}/") for name in checkpoint.tensors if name.startswith(f"{prefix}/")]
    for name in names:
        if name not in weights and name.partition("/")[2] not in weights:
            raise StorageError(f"checkpoint {checkpoint.folder} is invalid: {prefix}/{name} is not a parameter")
    tensors = empty_like_weights(weights, names)
    read(checkpoint, prefixed(prefix, tensors))
    return tensors
