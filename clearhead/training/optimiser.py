"""AdamW with weight decay only where it belongs, and the gradient's norm.

Decay pulls weights towards zero. That is wanted of the matrices that multiply (projections, convolutions), where it
limits how much a layer can amplify; it is not wanted of biases and of norms' scales, whose right size is not zero,
nor of tables that are looked up (token and position embeddings, [CLS]): a row that no batch touches would fade for
no reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.positions import LearnedPositionEmbedding, T5Bias
from clearhead.training.distributed import whole

# Modules whose parameters are looked up or added, never multiplied with the residual stream.
_TABLES = (nn.Embedding, LearnedPositionEmbedding, T5Bias)


def decay_groups(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the parameters that decay, and of those that do not; together, each trainable one exactly once.

    A parameter decays if it has two dimensions or more and stands in no table. An embedding that is tied to the logits
    is still a table."""
    found = (module for module in model.modules() if isinstance(module, _TABLES))
    tables = {id(parameter) for module in found for parameter in module.parameters()}
    decay: list[str] = []
    keep: list[str] = []
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # A parameter that hangs on a whole model itself ([CLS]) is no layer's matrix.
        is_layer = not any(True for _ in modules[name.rpartition(".")[0]].children())
        is_matrix = parameter.dim() >= 2 and id(parameter) not in tables and is_layer
        (decay if is_matrix else keep).append(name)
    return decay, keep


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
) -> torch.optim.AdamW:
    """AdamW over a model's parameters in two groups: those that decay and those that do not.

    The fused implementation is used wherever the parameters' device has one."""
    parameters = dict(model.named_parameters())
    decay, keep = decay_groups(model)
    groups: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in names], "weight_decay": strength}
        for names, strength in ((decay, weight_decay), (keep, 0.0))
        if names
    ]
    devices = ("cpu", "cuda", "xpu", "mps")
    fused = all(p.is_floating_point() and p.device.type in devices for p in parameters.values())
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused or None)


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """The 2-norm of all gradients together, before they are scaled down to `max_norm` (None: they are not)."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    return whole(torch.nn.utils.clip_grad_norm_(with_gradient, float("inf") if max_norm is None else max_norm))
