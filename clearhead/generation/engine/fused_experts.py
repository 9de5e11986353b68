"""A mixture of experts in a decode step: two kernels for all experts, without reading anything on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from clearhead._core.tensor_state import runs_triton
from clearhead.nn import ExpertsFeedForward, FeedForward
from clearhead.ops.activations import ClampedSwiGLU
from clearhead.ops.fused_linear import MAX_DECODE_ROWS, activation_code


class FusedExperts:
    """An `ExpertsFeedForward` whose experts are computed by Triton kernels if there are few rows."""

    def __init__(self, module: ExpertsFeedForward) -> None:
        from clearhead.ops.experts_triton import ExpertWeights

        self.module = module
        experts = _experts(module)
        first = experts[0]
        up, down = [expert.up for expert in experts], [expert.down for expert in experts]
        gate = [expert.gate for expert in experts if expert.gate is not None]
        sources = tuple(layer.weight.detach() for layer in (*up, *gate, *down))
        self.experts = ExpertWeights(
            up=_addresses(up),
            gate=_addresses(gate) if gate else None,
            down=_addresses(down),
            up_bias=_biases(up),
            gate_bias=_biases(gate) if gate else None,
            down_bias=_biases(down),
            activation=first.activation,
            d_ff=first.up.out_features,
            is_aligned=all(weight.data_ptr() % 16 == 0 for weight in sources),
            sources=sources,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the selected experts, and the shared one, to each row of x (R, M)."""
        from clearhead.ops.experts_triton import apply_experts

        module = self.module
        if not 0 < len(x) <= MAX_DECODE_ROWS:
            out: Tensor = module(x)
            return out
        weights, expert_ids = module.route(x)
        out = apply_experts(x, weights, expert_ids, self.experts)
        return out if module.shared is None else out + module.shared(x)


def can_fuse_experts(module: ExpertsFeedForward) -> bool:
    """Return whether the kernels support these experts on their device."""
    experts = _experts(module)
    weight = experts[0].up.weight
    if not runs_triton(weight) or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    activation = experts[0].activation
    if not isinstance(activation, ClampedSwiGLU) and activation_code(activation) is None:
        return False
    layers = [layer for expert in experts for layer in (expert.up, expert.gate, expert.down) if layer is not None]
    return all(type(layer) is nn.Linear and layer.weight.is_contiguous() for layer in layers)


def _experts(module: ExpertsFeedForward) -> list[FeedForward]:
    return [expert for expert in module.experts if isinstance(expert, FeedForward)]


def _addresses(layers: Iterable[nn.Linear]) -> Tensor:
    """Return the addresses of the weights, (n,) int64."""
    weights = [layer.weight for layer in layers]
    return torch.tensor([weight.data_ptr() for weight in weights], dtype=torch.int64, device=weights[0].device)


def _biases(layers: Iterable[nn.Linear]) -> Tensor | None:
    """Return the biases, (n, width), or None if the layers have none."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.stack(biases) if biases else None
