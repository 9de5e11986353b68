"""The decoder: every token looks at itself and what came before, and says what comes next (GPT).

With `cross_attention` it also looks at a memory, and is the writing half of the 2017 model. A `KVCache` lets it go on
where it stopped, at the price of the new tokens only.

    B batch   T new tokens   S memory   M model width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from clearhead._shapes import Float, Int
from clearhead.attention import KVCache
from clearhead.errors import ShapeError
from clearhead.layers import TokenEmbedding
from clearhead.masks import Mask, causal
from clearhead.models.stack import Stack, TextConfig, and_masks, check_ids
from clearhead.values import Count, Positive


@dataclass(frozen=True, kw_only=True)
class LMConfig(TextConfig):
    """What the Transformers that write text have in common besides: how their last features become logits."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"tied": "tie_embeddings", "logit_cap": "logit_softcap"}
    tie_embeddings: bool = True  # logits from the embedding matrix itself
    logit_bias: bool = False  # a learned number a token, added to its logit, as in Marian
    logit_scale: Positive = 1.0  # of the features, before they meet the vocabulary; T5 has 1 / √d_model
    logit_softcap: Positive | None = None  # c: a logit l becomes c · tanh(l / c), as in Gemma 2


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LMConfig):
    """`Decoder`'s configuration. `mask` is the pattern of its self-attention, such as `causal() & window(256, 0)`."""

    n_layers: Count
    mask: Mask = causal()
    cross_attention: bool = False

    def build(self) -> Decoder:
        return Decoder(self)


class Decoder(Stack):
    """A stack of masked self-attention blocks over token ids, and the logits of the next token."""

    embedding: TokenEmbedding

    def __init__(self, config: DecoderConfig) -> None:
        embedding = TokenEmbedding(config.vocab_size, config.d_model, scaled=config.scaled_embedding)
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers, cross=config.cross_attention)
        self.config = config
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.logit_bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.logit_bias else None
        config.init.apply(self, config.n_layers)

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
        """Logits of the token after each of `ids`.

        `mask` (padding, documents) is &-ed with the configured one. With a `cache`, `ids` are only the new tokens; they
        stand after those that the cache has seen, unless `positions`, (T,) or (B, T), says where. `memory_mask` says
        which of the memory's tokens count, usually `padding(source_lengths)`."""
        x = self.hidden_states(ids, mask=mask, positions=positions, cache=cache, memory=memory, memory_mask=memory_mask)
        if self.head is None:
            return self._capped(self.embedding.logits(x, self.logit_bias))
        return self.postprocess_logits(self.head(x))

    def postprocess_logits(self, products: Float[Tensor, "... V"]) -> Float[Tensor, "... V"]:
        """The logits, from the products of features and vocabulary: with the bias and the cap, where there are such."""
        return self._capped(products if self.logit_bias is None else products + self.logit_bias)

    def _capped(self, logits: Tensor) -> Tensor:
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
        """What `forward` makes its logits of, for a loss that never has all of them at once."""
        check_ids(ids)
        if self.config.cross_attention and memory is None:
            raise ShapeError("this decoder has cross-attention; give it memory=, what the encoder returned")
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
        """The matrix by which features become logits: `forward` is `features` times its transpose, `finished`."""
        return self.embedding.weight if self.head is None else self.head.weight
