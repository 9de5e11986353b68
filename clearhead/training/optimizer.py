"""AdamW with selective weight decay, and gradient clipping.

Weight decay applies to matrices that multiply (projections, convolutions), where it limits how much a layer can
amplify. It does not apply to biases and norm scales, whose right size is not zero, nor to embedding tables (tokens,
positions, [CLS]), where a row that no batch uses would fade."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from clearhead._core.validation import require
from clearhead.nn.positions import LearnedPositionEmbedding, T5Bias
from clearhead.training.distributed import full_tensor

# Modules whose parameters are looked up or added, never multiplied with the residual stream.
_TABLES = (nn.Embedding, LearnedPositionEmbedding, T5Bias)


def decay_groups(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the trainable parameters with and without weight decay.

    A parameter decays if it has two or more dimensions and is not in an embedding table. An embedding that is tied to
    the logits is still a table."""
    table_modules = (module for module in model.modules() if isinstance(module, _TABLES))
    tables = {id(parameter) for module in table_modules for parameter in module.parameters()}
    decay: list[str] = []
    no_decay: list[str] = []
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # A parameter of a module with children ([CLS] of a model) is not a layer's matrix.
        is_layer = not any(True for _ in modules[name.rpartition(".")[0]].children())
        is_matrix = parameter.dim() >= 2 and id(parameter) not in tables and is_layer
        (decay if is_matrix else no_decay).append(name)
    return decay, no_decay


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
) -> torch.optim.AdamW:
    """Return AdamW over a model's parameters in two groups, with and without weight decay.

    The fused implementation is used if the parameters' device supports it."""
    parameters = dict(model.named_parameters())
    decay, no_decay = decay_groups(model)
    groups: list[dict[str, object]] = [
        {"params": [parameters[name] for name in names], "weight_decay": strength}
        for names, strength in ((decay, weight_decay), (no_decay, 0.0))
        if names
    ]
    require(
        bool(groups), "no parameter of the model requires a gradient; call requires_grad_(True) on those to be trained"
    )
    devices = ("cpu", "cuda", "xpu", "mps")
    fused = all(p.is_floating_point() and p.device.type in devices for p in parameters.values())
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused or None)


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Clip the 2-norm of all gradients together to `max_norm` (None: no clipping) and return the norm before it."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    return full_tensor(torch.nn.utils.clip_grad_norm_(with_gradient, float("inf") if max_norm is None else max_norm))
