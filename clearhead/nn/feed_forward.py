"""The feed-forward network of a block, which is applied to each token separately.

Letters: M model dim, F feed-forward dim."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.typed_module import Module
from clearhead._core.validation import DropoutRate, check_int, validate
from clearhead.errors import ShapeError
from clearhead.ops.activations import Activation, ClampedSwiGLU


class FeedForward(Module):
    """down(activation(up(x))), or down(activation(gate(x)) · up(x)) if the activation is gated.

    Dropout is applied to the F hidden features, before `down`.

    Args:
        d_model: Input and output dim M.
        d_ff: Hidden dim F.
        activation: Activation, such as `GELU()` or `SwiGLU()`.
        bias: Whether the linear layers have biases.
        dropout: Dropout rate.
    """

    def __init__(
        self, d_model: int, d_ff: int, activation: Activation, *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        d_model = check_int(d_model, "FeedForward: d_model", minimum=1)
        d_ff = check_int(d_ff, "FeedForward: d_ff", minimum=1)
        self.activation: Activation = validate(activation, "FeedForward: activation", Activation)
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if activation.gated else None
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.dropout = nn.Dropout(validate(dropout, "FeedForward: dropout", DropoutRate))
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        """Apply the network to the last dim of x (…, M)."""
        if x.ndim < 1 or x.shape[-1] != self.up.in_features:
            raise ShapeError(f"x has shape {tuple(x.shape)}; expected (…, {self.up.in_features})")
        if self.gate is None:
            hidden = self.activation(self.up(x))  # (…, F)
        else:
            up = self.up(x)
            up = self.activation.transform_up(up) if isinstance(self.activation, ClampedSwiGLU) else up
            hidden = self.activation(self.gate(x)) * up
        out: Tensor = self.down(self.dropout(hidden))
        return out
