"""The decoder: causal self-attention over token ids, and the logits of the next token (GPT).

With `cross_attention` it also attends to the output of an encoder, as in the original Transformer. With a `KVCache`, a
call computes the new tokens only.

    B batch   T new tokens   S memory   M model width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float, Int
from clearhead._core.validation import PositiveFloat, PositiveInt, require
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Mask, causal
from clearhead.models.stack import Stack, TextConfig, and_masks, validate_ids
from clearhead.nn import KVCache, TokenEmbedding

LOGIT_FIELDS = ("tie_embeddings", "logit_bias", "logit_scale", "logit_softcap")  # without effect on hidden states


@dataclass(frozen=True, kw_only=True)
class LMConfig(TextConfig):
    """Fields of language models: how hidden states become logits."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"tied": "tie_embeddings", "logit_cap": "logit_softcap"}
    lm_head: bool = True  # without it, the output is the hidden states
    tie_embeddings: bool = True  # use the embedding matrix for the logits
    logit_bias: bool = False  # a learned bias per token, as in Marian
    logit_scale: PositiveFloat = 1.0  # of the hidden states; 1 / √d_model in T5
    logit_softcap: PositiveFloat | None = None  # c: a logit l becomes c · tanh(l / c), as in Gemma 2

    def validate(self) -> None:
        super().validate()
        plain = LMConfig.__dataclass_fields__
        changed = [name for name in LOGIT_FIELDS if getattr(self, name) != plain[name].default]
        require(
            self.lm_head or not changed,
            f"{self.owner}: lm_head is False, so there are no logits; leave {', '.join(changed)} out",
        )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LMConfig):
    """`Decoder`'s configuration. `mask` is the pattern of its self-attention, such as `causal() & window(256, 0)`."""

    n_layers: PositiveInt
    mask: Mask = causal()
    cross_attention: bool = False

    def build(self) -> Decoder:
        return Decoder(self)


class Decoder(Stack):
    """A stack of masked self-attention blocks over token ids, and the logits of the next token."""

    embedding: TokenEmbedding

    @explain_keywords
    def __init__(self, config: DecoderConfig) -> None:
        embedding = config.build_embedding(config.vocab_size, config.d_model)
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers, cross=config.cross_attention)
        self.config = config
        has_matrix = config.lm_head and not config.tie_embeddings
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False) if has_matrix else None
        self.logit_bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.logit_bias else None
        config.init.apply(self, config.n_layers)

    @explain_keywords
    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        mask: Mask | None = None,
        positions: Int[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
        memory: Float[Tensor, "B S M"] | None = None,
        memory_mask: Mask | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits of the next token after each of `ids`, or without a head the hidden states.

        Args:
            ids: Token ids; with a `cache`, only the new ones.
            mask: Combined with the configured mask, for example padding or documents.
            positions: Positions of the tokens, (T,) or (B, T); by default they follow those in the cache.
            cache: KV cache, which is updated.
            memory: Encoder output, required by cross-attention.
            memory_mask: Which encoder positions may be attended to, usually `padding(source_lengths)`.
        """
        x = self.hidden_states(ids, mask=mask, positions=positions, cache=cache, memory=memory, memory_mask=memory_mask)
        if not self.config.lm_head:
            return x
        if self.head is None:
            return self._softcap(self.embedding.logits(x, self.logit_bias))
        return self.postprocess_logits(self.head(x))

    def postprocess_logits(self, products: Float[Tensor, "... V"]) -> Float[Tensor, "... V"]:
        """Add the bias and apply the soft cap to the product of hidden states and vocabulary."""
        return self._softcap(products if self.logit_bias is None else products + self.logit_bias)

    def _softcap(self, logits: Tensor) -> Tensor:
        """Apply the configured soft cap to logits."""
        cap = self.config.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def hidden_states(
        self,
        ids: Int[Tensor, "B T"],
        *,
        mask: Mask | None = None,
        positions: Int[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
        memory: Float[Tensor, "B S M"] | None = None,
        memory_mask: Mask | None = None,
    ) -> Float[Tensor, "B T M"]:
        """Return the hidden states from which `forward` computes its logits, for a chunked loss."""
        validate_ids(ids)
        if self.config.cross_attention and memory is None:
            raise ShapeError("this decoder has cross-attention; pass the encoder output as memory=")
        if memory is not None and not self.config.cross_attention:
            raise ShapeError(
                "got memory, but this decoder has no cross-attention; set cross_attention=True in its config"
            )
        x = self.add_positions(self.embedding(ids), positions, 0 if cache is None else cache.length)
        x = self.run_blocks(
            x, mask=and_masks(self.config.mask, mask), memory=memory, memory_mask=memory_mask, cache=cache
        )
        return x if self.config.logit_scale == 1 else x * self.config.logit_scale

    def lm_head_weight(self) -> Float[Tensor, "V M"]:
        """Return the output matrix: `forward` is `hidden_states` times its transpose, post-processed."""
        if not self.config.lm_head:
            raise ConfigError("this Decoder has no language-model head (lm_head=False); its output is hidden states")
        return self.embedding.weight if self.head is None else self.head.weight
