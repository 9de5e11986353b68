"""The feed-forward half of a block: each token on its own, up to width F, through a non-linearity, and down again.

Letters: M model width, F feed-forward width."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.validation import DropoutRate, check_int, validate
from clearhead.errors import ShapeError
from clearhead.ops.activations import Activation


class FeedForward(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) · up(x)) where the activation is gated.

    Dropout, in training, falls on the F hidden features, just before the way down."""

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
        """Each token by itself: (…, M) becomes (…, F) and (…, M) again."""
        if x.ndim < 1 or x.shape[-1] != self.up.in_features:
            wanted = f"(…, {self.up.in_features}), the width of this feed-forward"
            raise ShapeError(f"x has shape {tuple(x.shape)}; expected {wanted}.")
        if self.gate is None:
            hidden = self.activation(self.up(x))  # (…, F)
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden))
