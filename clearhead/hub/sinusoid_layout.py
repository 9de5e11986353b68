"""Reorder the features of a model, so that interleaved sinusoids become split ones.

transformers has the split layout only: all sines, then all cosines. The order of the features of the residual stream
is arbitrary, so a model with interleaved sinusoids equals one with split sinusoids whose parameters are permuted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.errors import StorageError
from clearhead.hub.weight_map import fits
from clearhead.models import EncoderDecoder, storage
from clearhead.nn.positions import Sinusoidal

# Parameters with a dimension of the residual stream, and that dimension.
_DIMENSIONS = {
    "*embedding.weight": 1,
    "*norm#.*": 0,
    "*norm.*": 0,
    "*norm_cross.*": 0,
    "*attention.q_proj.weight": 1,
    "*attention.k_proj.weight": 1,
    "*attention.v_proj.weight": 1,
    "*attention.o_proj.weight": 0,
    "*attention.o_proj.bias": 0,
    "*feed_forward.up.weight": 1,
    "*feed_forward.gate.weight": 1,
    "*feed_forward.down.weight": 0,
    "*feed_forward.down.bias": 0,
    "*head.weight": 1,
}
_UNCHANGED = (
    *(f"*attention.{x}_proj.bias" for x in "qkv"),
    "*feed_forward.up.bias",
    "*feed_forward.gate.bias",
    "*logit_bias",
)


@torch.no_grad()
def with_split_sinusoids(model: nn.Module) -> nn.Module:
    """Return an equal model with split sinusoids, or the model itself if it has no interleaved ones.

    Raises:
        StorageError: If a parameter is not known to have a dimension of the residual stream or not.
    """
    positions = getattr(getattr(model, "config", None), "positions", None)
    if not isinstance(model, EncoderDecoder) or positions != Sinusoidal(getattr(positions, "base", 10000.0)):
        return model
    M = model.config.d_model
    order = torch.cat((torch.arange(0, M, 2), torch.arange(1, M, 2)))
    config = model.config.replace(positions=Sinusoidal(positions.base, layout="split"))
    permuted = {name: _permute(name, tensor, order) for name, tensor in model.named_parameters()}
    with torch.device("meta"):
        result = config.build()
    return storage.assign_parameters(result, permuted)


def _permute(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """Return a parameter with permuted features."""
    for pattern, dim in _DIMENSIONS.items():
        if fits(name, [pattern]):
            return tensor.index_select(dim, order.to(tensor.device))
    if fits(name, _UNCHANGED):
        return tensor
    raise StorageError(f"the features of {name} cannot be reordered, so interleaved sinusoids cannot be exported")
