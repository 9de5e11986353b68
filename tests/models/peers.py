"""torch's Transformer as an oracle: whose weight is whose.

A table maps a peer's tensors to ours by splitting and turning them. It serves weights and gradients alike, because both
are rearranged in the same way. The tables of other makers' models are those of `clearhead/interop`.
"""

from __future__ import annotations

from torch import Tensor, nn

Tensors = dict[str, Tensor]


def weights(model: nn.Module) -> Tensors:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def gradients(model: nn.Module) -> Tensors:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def copy_into(model: nn.Module, tensors: Tensors) -> None:
    """Every parameter of ours is set, and nothing is left over."""
    names = {name for name, _ in model.named_parameters()}  # a tied weight has one name here
    assert names == set(tensors)
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, strict=False)


def linear(reference: Tensors, module: str, name: str) -> Tensors:
    """One linear map or norm, weight and (if there is one) bias."""
    return {
        f"{module}.{part}": reference[f"{name}.{part}"] for part in ("weight", "bias") if f"{name}.{part}" in reference
    }


def split(tensors: tuple[Tensor, ...], module: str) -> Tensors:
    """A fused (q, k, v) weight and bias, rows stacked, as three linear maps."""
    result: Tensors = {}
    for part, tensor in zip(("weight", "bias"), tensors, strict=False):
        for name, piece in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
            result[f"{module}.{name}.{part}"] = piece
    return result


def from_torch(t: Tensors, n_layers: int, stack: str) -> Tensors:
    """One half, "encoder" or "decoder", of nn.Transformer."""
    module = linear(t, f"{stack}.norm", f"{stack}.norm")
    for i in range(n_layers):
        a, b = f"{stack}.blocks.{i}", f"{stack}.layers.{i}"
        parts = [("attention", "self_attn")] + [("cross_attention", "multihead_attn")] * (stack == "decoder")
        for mine, reference in parts:
            module |= split((t[f"{b}.{reference}.in_proj_weight"], t[f"{b}.{reference}.in_proj_bias"]), f"{a}.{mine}")
            module |= linear(t, f"{a}.{mine}.o_proj", f"{b}.{reference}.out_proj")
        names = ["norm1", "norm_cross", "norm2"] if stack == "decoder" else ["norm1", "norm2"]
        for place, name in enumerate(names, start=1):
            module |= linear(t, f"{a}.{name}", f"{b}.norm{place}")
        module |= linear(t, f"{a}.feed_forward.up", f"{b}.linear1") | linear(
            t, f"{a}.feed_forward.down", f"{b}.linear2"
        )
    return module
