"""The hearing half of an encoder-decoder: frames of sound in, one vector for two frames out (Whisper).

B recordings   T frames   F features   N moments   M model width
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.layers import SoundEmbedding
from clearhead.masks import Mask, full
from clearhead.models.stack import Stack, TransformerConfig, both
from clearhead.positions import Positions, Sinusoidal
from clearhead.values import Count


@dataclass(frozen=True, kw_only=True)
class SoundConfig(TransformerConfig):
    """`SoundEncoder`'s configuration; `max_len` is the number of moments, two frames each, that it is meant for."""

    n_layers: Count
    n_features: Count = 80
    max_len: Count = 1500
    positions: Positions = Sinusoidal(halves=True)
    mask: Mask = full()

    def validate(self) -> None:
        super().validate()
        self.check_positions(self.positions)

    def build(self) -> SoundEncoder:
        return SoundEncoder(self)


class SoundEncoder(Stack):
    """A stack of self-attention blocks behind a front of convolutions."""

    def __init__(self, config: SoundConfig) -> None:
        embedding = SoundEmbedding(config.n_features, config.d_model)
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers)
        self.config = config
        config.init.apply(self, config.n_layers)

    def forward(
        self, frames: Float[Tensor, "B T F"], *, mask: Mask | None = None, positions: Int[Tensor, "..."] | None = None
    ) -> Float[Tensor, "B N M"]:
        """One vector a moment. `mask` speaks of moments, of which there are half as many as frames."""
        return self.run(self.place(self.embedding(frames), positions), mask=both(self.config.mask, mask))
