"""The encoder: every token looks at every other, in both directions (BERT, and the reading half of the 2017 model).

Ids in, one vector a token out; what to do with the vectors is the caller's.

    B batch   T tokens   M model width
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import find_out_of_range
from clearhead._core.validation import NonNegativeInt, PositiveInt, require
from clearhead.errors import ShapeError
from clearhead.masks import Mask, full
from clearhead.models.stack import Stack, TextConfig, and_masks, validate_ids
from clearhead.nn import TokenEmbedding
from clearhead.nn.positions import Sinusoidal


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextConfig):
    """`Encoder`'s configuration. `mask` is the pattern of its self-attention, which padding is added to at run time."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"d_embedding": "embedding_dim"}
    n_layers: PositiveInt
    mask: Mask = full()
    n_segments: NonNegativeInt = (
        0  # kinds of text that may stand side by side, each with a vector of its own, as in BERT
    )
    pooler: bool = False  # a last map of the first token, for `pooled`
    embedding_dim: PositiveInt | None = (
        None  # the embeddings' own width, which a linear map makes d_model, as in ALBERT
    )
    share_layers: bool = False  # one block's weights in all layers, as in ALBERT
    n_classes: NonNegativeInt = 0  # that a text may be of, by a linear map of what the pooler gives

    def validate(self) -> None:
        super().validate()
        require(
            self.pooler or not self.n_classes,
            f"{self.owner}: texts are classified by what the pooler gives, and n_classes is {self.n_classes} without "
            "one; set pooler=True",
        )
        require(
            not isinstance(self.positions, Sinusoidal) or (self.embedding_dim or 2) % 2 == 0,
            f"{self.owner}: embedding_dim is {self.embedding_dim}; expected an even number for Sinusoidal positions",
        )
        require(
            not self.share_layers or (self.first_norm and not self.layer_rotary),
            f"{self.owner}: layers that share their weights are one block; leave first_norm and layer_rotary out",
        )

    def build(self) -> Encoder:
        return Encoder(self)


class Encoder(Stack):
    """A stack of self-attention blocks over token ids."""

    embedding: TokenEmbedding

    def __init__(self, config: EncoderConfig) -> None:
        width = config.embedding_dim or config.d_model
        embedding = TokenEmbedding(config.vocab_size, width, scaled=config.scaled_embedding)
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers)
        self.config = config
        self.segments = nn.Embedding(config.n_segments, width) if config.n_segments else None
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        self.head = nn.Linear(config.d_model, config.n_classes) if config.n_classes else None
        config.init.apply(self, config.n_layers)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        mask: Mask | None = None,
        positions: Int[Tensor, "..."] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T M"]:
        """One vector a token. Give `mask=padding(lengths)` for texts of different lengths in one batch.

        `positions`, (T,) or (B, T), says where the tokens stand (for positions that are added); None is 0 … T − 1.
        `segments` (B, T) says of which kind of text each token is (where there are any); None is the first."""
        validate_ids(ids)
        x = self.add_positions(self._with_segments(self.embedding(ids), segments), positions)
        return self.run_blocks(x, mask=and_masks(self.config.mask, mask))

    def pooled(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        """One vector a text, from what `forward` returned: tanh of a linear map of the first token, as BERT has it."""
        if self.pooler is None:
            raise ShapeError(
                "this encoder has no pooler; set pooler=True in its config, or take the mean of its tokens"
            )
        return self.pooler(x[:, 0]).tanh()

    def classified(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B classes"]:
        """The logits of the classes that a text may be of, from what `forward` returned."""
        if self.head is None:
            raise ShapeError("this encoder knows no classes; set n_classes in its config, and train it")
        return self.head(self.pooled(x))

    def _with_segments(self, x: Tensor, segments: Tensor | None) -> Tensor:
        if self.segments is None:
            if segments is not None:
                raise ShapeError("got segments, and this encoder has none; set n_segments in its config")
            return x
        if segments is None:
            return x + self.segments.weight[0]
        validate_ids(segments, "segments")
        if (wrong := find_out_of_range(segments, self.segments.num_embeddings)) is not None:
            raise ShapeError(f"segments hold {wrong}; expected 0 … {self.segments.num_embeddings - 1}")
        return x + self.segments(segments)
