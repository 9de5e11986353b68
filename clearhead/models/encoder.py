"""The encoder: bidirectional self-attention over token ids (BERT), with one output vector per token.

B batch   T tokens   M model dim
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import find_out_of_range
from clearhead._core.typed_module import Module
from clearhead._core.validation import NonNegativeInt, PositiveInt, require
from clearhead.errors import ShapeError
from clearhead.masks import Mask, full
from clearhead.models.stack import Stack, StackOptions, TextConfig, and_masks, validate_ids
from clearhead.nn import PoolerActivation, Tanh, TokenEmbedding
from clearhead.nn.positions import RelativeBias, Sinusoidal


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextConfig):
    """Configuration of `Encoder`.

    Attributes:
        n_layers: Number of layers.
        mask: Mask of self-attention, combined with the padding mask of a call.
        n_segments: Number of segment embeddings (token types in BERT).
        pooler: Whether the model has the linear layer of `pool`.
        pooler_activation: Activation of the pooler.
        relative_positions: Positions on the scores in addition to added `positions` (MPNet); None for no others.
        embedding_dim: Width of the embeddings, which are projected to d_model (ALBERT); None for d_model.
        share_layers: Whether all layers share the parameters of one block (ALBERT).
        n_classes: Number of classes of the head; 0 for none.
        head: Predictions of the head.
            "sequence": classes of a text, by `classify`, which needs the pooler.
            "token": classes of each token, by `classify_tokens`.
            "span": the first and the last token of an answer, by `classify_tokens` with two classes.
            "choice": a score of one of several texts, by `classify` with one class.
            "masked_lm": masked tokens, by `predict_tokens`; `n_classes` is 0.
    """

    renamed_fields: ClassVar[Mapping[str, str]] = {"d_embedding": "embedding_dim"}
    n_layers: PositiveInt
    mask: Mask = full()
    n_segments: NonNegativeInt = 0
    pooler: bool = False
    pooler_activation: PoolerActivation = Tanh()
    relative_positions: RelativeBias | None = None
    embedding_dim: PositiveInt | None = None
    share_layers: bool = False
    n_classes: NonNegativeInt = 0
    head: Literal["sequence", "token", "span", "choice", "masked_lm"] = "sequence"

    @property
    def stack_options(self) -> StackOptions:
        """Options of the stack that not all Transformers have."""
        return replace(
            super().stack_options,
            relative_positions=self.relative_positions,
            embedding_dim=self.embedding_dim,
            share_layers=self.share_layers,
        )

    def validate(self) -> None:
        super().validate()
        require(
            self.pooler or not self.n_classes or self.head not in ("sequence", "choice"),
            f"{self.owner}: n_classes is {self.n_classes}, and classification requires the pooler; set pooler=True",
        )
        n_classes = {"span": 2, "choice": 1, "masked_lm": 0}.get(self.head, self.n_classes)
        require(
            self.n_classes == n_classes,
            f"{self.owner}: n_classes is {self.n_classes}; expected {n_classes} for head={self.head!r}",
        )
        require(
            not isinstance(self.positions, Sinusoidal) or (self.embedding_dim or 2) % 2 == 0,
            f"{self.owner}: embedding_dim is {self.embedding_dim}; expected an even number for Sinusoidal positions",
        )
        require(
            not self.share_layers or (self.first_norm and not self.layer_rotary and not self.n_dense_layers),
            f"{self.owner}: shared layers are one block; leave first_norm, layer_rotary and n_dense_layers out",
        )
        require(
            self.relative_positions is None or self.positions.kind == "added",
            f"{self.owner}: relative_positions are used in addition to added positions, and positions is "
            f"{self.positions}; use positions={self.relative_positions}",
        )

    def build(self) -> Encoder:
        return Encoder(self)


class MaskedLMHead(Module):
    """The head that predicts masked tokens: a layer, and the embedding matrix with a bias as the output matrix."""

    def __init__(self, config: EncoderConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, width, bias=config.biases.ff)
        self.activation = config.activation
        self.norm = config.norm.build(width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Float[Tensor, "B T M"], embedding: TokenEmbedding) -> Float[Tensor, "B T V"]:
        """Return the logits of each token."""
        return embedding.logits(self.norm(self.activation(self.dense(x))), self.bias)


class Encoder(Stack):
    """A stack of self-attention blocks over token ids."""

    embedding: TokenEmbedding
    head: nn.Linear | MaskedLMHead | None

    @explain_keywords
    def __init__(self, config: EncoderConfig) -> None:
        width = config.embedding_dim or config.d_model
        embedding = config.build_embedding(config.vocab_size, width)
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers)
        self.config = config
        self.segments = nn.Embedding(config.n_segments, width) if config.n_segments else None
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        self.head = nn.Linear(config.d_model, config.n_classes) if config.n_classes else None
        if config.head == "masked_lm":
            self.head = MaskedLMHead(config, width)
        config.init.apply(self, config.n_layers)

    @explain_keywords
    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        mask: Mask | None = None,
        positions: Int[Tensor, "..."] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T M"]:
        """Return one vector per token.

        Args:
            ids: Token ids.
            mask: Combined with the configured mask; use `padding(lengths)` for texts of different lengths.
            positions: Positions of the tokens, (T,) or (B, T), for positions that are added; by default 0 … T − 1.
            segments: Segment ids, (B, T); by default 0.
        """
        validate_ids(ids)
        x = self.add_positions(self._with_segments(self.embedding(ids), segments), positions)
        return self.run_blocks(x, mask=and_masks(self.config.mask, mask))

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        """Return one vector per text from the output of `forward`: a linear layer of the first token, activated."""
        if self.pooler is None:
            raise ShapeError("this encoder has no pooler; set pooler=True in its config, or use the mean of its output")
        pooled: Tensor = self.pooler(x[:, 0])
        return self.config.pooler_activation(pooled)

    def classify(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B classes"]:
        """Return the logits of the classes from the output of `forward`."""
        if not isinstance(self.head, nn.Linear) or self.config.head not in ("sequence", "choice"):
            raise ShapeError("this encoder has no classification head; set n_classes in its config and train it")
        logits: Tensor = self.head(self.pool(x))
        return logits

    def classify_tokens(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B T classes"]:
        """Return the logits of the classes of each token from the output of `forward`."""
        if not isinstance(self.head, nn.Linear) or self.config.head not in ("token", "span"):
            raise ShapeError(
                'this encoder has no head for tokens; set head="token" and n_classes in its config and train it'
            )
        logits: Tensor = self.head(x)
        return logits

    def predict_tokens(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B T V"]:
        """Return the logits of the vocabulary at each token from the output of `forward`."""
        if not isinstance(self.head, MaskedLMHead):
            raise ShapeError('this encoder has no head for masked tokens; set head="masked_lm" in its config')
        logits: Tensor = self.head(x, self.embedding)
        return logits

    def _with_segments(self, x: Tensor, segments: Tensor | None) -> Tensor:
        """Add segment embeddings, if the model has any."""
        if self.segments is None:
            if segments is not None:
                raise ShapeError(
                    "got segments, but this encoder has no segment embeddings; set n_segments in its config"
                )
            return x
        if segments is None:
            return x + self.segments.weight[0]
        validate_ids(segments, "segments")
        invalid_id = find_out_of_range(segments, self.segments.num_embeddings)
        if invalid_id is not None:
            raise ShapeError(f"segments contain {invalid_id}; expected 0 … {self.segments.num_embeddings - 1}")
        embeddings: Tensor = self.segments(segments)
        return x + embeddings
