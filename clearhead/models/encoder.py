"""The encoder: every token looks at every other, in both directions (BERT, and the reading half of the 2017 model).

Ids in, one vector a token out; what to do with the vectors is the caller's.

    B batch   T tokens   M model width
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.layers import TokenEmbedding
from clearhead.masks import Mask, full
from clearhead.models.stack import Stack, TextConfig, both, check_ids
from clearhead.values import Count

__all__ = ["Encoder", "EncoderConfig"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextConfig):
    """`Encoder`'s configuration. `mask` is the pattern of its self-attention, which padding is added to at run time."""

    n_layers: Count
    mask: Mask = full()

    def build(self) -> Encoder:
        return Encoder(self)


class Encoder(Stack):
    """A stack of self-attention blocks over token ids."""

    embedding: TokenEmbedding

    def __init__(self, config: EncoderConfig) -> None:
        embedding = TokenEmbedding(config.vocab_size, config.d_model, scaled=config.scaled_embedding)
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers)
        self.config = config
        config.init.apply(self, config.n_layers)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        mask: Mask | None = None,
        positions: Int[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B T M"]:
        """One vector a token. Give `mask=padding(lengths)` for texts of different lengths in one batch.

        `positions`, (T,) or (B, T), says where the tokens stand (for positions that are added); None is 0 … T − 1.
        """
        check_ids(ids)
        x = self.place(self.embedding(ids), positions)
        return self.run(x, mask=both(self.config.mask, mask))
