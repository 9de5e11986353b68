"""Everything that a run has to carry from one step to the next, as named tensors, and back.

Weights go by their names in the model. AdamW's state is `optimiser/exp_avg/NAME` and so on, random generators are
`rng/RANK/cpu` and `rng/RANK/cuda`: one flat collection, whichever way the model is shared out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from clearhead.data import draws
from clearhead.training.checkpoints import Checkpoint, read
from clearhead.training.distributed import World

_PARTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps of a parameter
_DROPOUT = 503


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter once, under its first name, and the buffers that are stored with a model."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    stored = model.state_dict(keep_vars=True)
    return named | {name: buffer for name, buffer in model.named_buffers() if name in stored}


def optimiser_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """AdamW's moments and counts, by the names of the parameters they belong to."""
    return {
        f"optimiser/{part}/{name}": optimiser.state[parameter][part]
        for name, parameter in model.named_parameters()
        if parameter in optimiser.state
        for part in _PARTS
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give AdamW the moments and counts of a checkpoint. A parameter that had none then has none now."""
    places: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if f"optimiser/step/{name}" not in checkpoint.tensors:
            optimiser.state.pop(parameter, None)
            continue
        step = torch.zeros((), device=parameter.device if optimiser.defaults.get("fused") else "cpu")
        state = {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimiser.state[parameter] = state
        places |= {f"optimiser/{part}/{name}": tensor.detach() for part, tensor in state.items()}
    read(checkpoint, places)


def seed(run_seed: int, world: World, step: int = 0) -> None:
    """Start this process's generators (dropout) in a place of their own."""
    torch.manual_seed(int(draws.bits(_DROPOUT, run_seed, step, world.rank)) & (2**63 - 1))


def rng_tensors(world: World) -> dict[str, Tensor]:
    """The generators' states of all processes; all must call it."""
    mine = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(world.device)
    found = enumerate(world.gather(mine))
    return {f"rng/{rank}/{kind}": state for rank, states in found for kind, state in states.items()}


def restore_rng(checkpoint: Checkpoint, world: World, run_seed: int) -> None:
    """Go on with the random numbers that would have come next; a process that is new starts its own."""
    seed(run_seed, world, checkpoint.step)
    shapes = {name: shape for name, shape in checkpoint.tensors.items() if name.startswith("rng/")}
    found = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    read(checkpoint, found)
    if (cpu := found.get(f"rng/{world.rank}/cpu")) is not None:
        torch.set_rng_state(cpu)
    if world.device.type == "cuda" and (cuda := found.get(f"rng/{world.rank}/cuda")) is not None:
        torch.cuda.set_rng_state(cuda, world.device)


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def names_under(prefix: str, names: Iterable[str]) -> list[str]:
    """The rest of each name that begins with `prefix/`."""
    return [name.removeprefix(f"{prefix}/") for name in names if name.startswith(f"{prefix}/")]
