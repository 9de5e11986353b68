"""The encoder-decoder: one stack reads, another writes and looks back at what was read (the 2017 Transformer).

B batch   S source tokens   T target tokens   M model width   V vocabulary
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.validation import PositiveInt, require
from clearhead.errors import MaskError
from clearhead.masks import Mask, as_mask, causal, full
from clearhead.models.decoder import Decoder, DecoderConfig, LMConfig
from clearhead.models.encoder import Encoder, EncoderConfig
from clearhead.models.speech import AudioEncoder, AudioEncoderConfig
from clearhead.models.stack import TextConfig, TransformerConfig
from clearhead.nn import KVCache
from clearhead.nn.positions import Positions, RelativeBias


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(LMConfig):
    """Both halves have the same sizes; `.encoder` and `.decoder` are the configurations of each.

    `vocab_size` counts the target's tokens. `share_embeddings` uses one matrix for source and target (and, with `tied`,
    for the logits too), as the 2017 model does; then there is one vocabulary. The embedding is then one module in two
    places: give `torch.func.functional_call` such a model with `tie_weights=False`, or torch swaps its weight twice and
    leaves in the model the one that was lent to it."""

    n_encoder_layers: PositiveInt
    n_decoder_layers: PositiveInt
    source_vocab_size: PositiveInt | None = None  # None: vocab_size
    share_embeddings: bool = False
    encoder_mask: Mask = full()
    decoder_mask: Mask = causal()
    encoder_positions: Positions | None = None  # None: as those of the decoder
    encoder_max_len: PositiveInt | None = None  # None: max_len
    n_features: PositiveInt | None = None  # of a frame of sound, where the source is heard and not read, as in Whisper

    def validate(self) -> None:
        super().validate()
        require(
            self.n_features is None
            or not (self.share_embeddings or self.source_vocab_size is not None or self.layer_masks),
            f"EncoderDecoderConfig: n_features is {self.n_features}, so the source is sound, which has no vocabulary; "
            "leave out share_embeddings, source_vocab_size and layer_masks",
        )
        if self.encoder_positions is not None or self.encoder_max_len is not None or self.n_features is not None:
            self.encoder.validate()
        require(
            not self.share_embeddings or self.source_vocab_size in (None, self.vocab_size),
            f"EncoderDecoderConfig: share_embeddings needs one vocabulary, and source_vocab_size "
            f"{self.source_vocab_size} is not vocab_size {self.vocab_size}; make them equal, or share_embeddings=False",
        )

    @property
    def encoder(self) -> EncoderConfig | AudioEncoderConfig:
        """The configuration of the reading half."""
        own: dict[str, Any] = {"n_layers": self.n_encoder_layers, "mask": self.encoder_mask}
        own["positions"] = self.encoder_positions or self.positions
        own["max_len"] = self.encoder_max_len or self.max_len
        if self.n_features is not None:
            return AudioEncoderConfig(**self._shared(TransformerConfig) | own, n_features=self.n_features)
        own["vocab_size"] = self.source_vocab_size or self.vocab_size
        return EncoderConfig(**self._shared(TextConfig) | own)

    @property
    def decoder(self) -> DecoderConfig:
        """The configuration of the writing half."""
        shared = self._shared(LMConfig)
        if isinstance(self.positions, RelativeBias):
            # The decoder sees only what came before, and should not spend half of its buckets on what comes after.
            shared["positions"] = dataclasses.replace(self.positions, bidirectional=False)
        return DecoderConfig(**shared, n_layers=self.n_decoder_layers, mask=self.decoder_mask, cross_attention=True)

    def build(self) -> EncoderDecoder:
        return EncoderDecoder(self)


class EncoderDecoder(nn.Module):
    """Reads `source`, or hears it, and writes `target`."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder: Encoder | AudioEncoder = config.encoder.build()
        self.decoder = Decoder(config.decoder)
        if config.share_embeddings and isinstance(self.encoder, Encoder):
            self.decoder.embedding = self.encoder.embedding

    def forward(
        self,
        source: Int[Tensor, "B S"] | Float[Tensor, "B frames F"],
        target: Int[Tensor, "B T"],
        *,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        memory_mask: Mask | None = None,
        source_positions: Int[Tensor, "..."] | None = None,
        target_positions: Int[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token after each of `target`, given all of `source`.

        `source_mask` (`padding(source_lengths)`) hides padding from the encoder's self-attention and, where no
        `memory_mask` is given, from the decoder's cross-attention; `target_mask` is added to the decoder's own. Where
        several pairs share a row, masks keep them apart and `…_positions` count from the start of each; a model whose
        positions are distances needs none of these and leaves them."""
        memory, told = self._read(source, source_mask, target_mask, memory_mask, source_positions, target_positions)
        return self.decode(target, memory, **told)

    def hidden_states(
        self, source: Int[Tensor, "B S"] | Float[Tensor, "B frames F"], target: Int[Tensor, "B T"], **given: Any
    ) -> Float[Tensor, "B T M"]:
        """What `forward`, given the same, makes its logits of: for a loss that never has all of them at once."""
        memory, told = self._read(source, **given)
        return self.decoder.hidden_states(target, memory=memory, **told)

    def lm_head_weight(self) -> Float[Tensor, "V M"]:
        """The matrix by which features become logits: `forward` is `features` times its transpose, finished."""
        return self.decoder.lm_head_weight()

    @property
    def logit_bias(self) -> nn.Parameter | None:
        """What is added to the logits, where there is such."""
        return self.decoder.logit_bias

    def _read(
        self,
        source: Tensor,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        memory_mask: Mask | None = None,
        source_positions: Tensor | None = None,
        target_positions: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The memory of a source, and what the decoder is told besides."""
        if memory_mask is None:
            memory_mask = source_mask
            if source_mask is not None and as_mask(source_mask).depends_on_query:
                raise MaskError(
                    f"source_mask {source_mask} depends on the query's position, and serves two kinds of query: source "
                    "and target tokens; give memory_mask too, or put the pattern in the config's encoder_mask"
                )
        reads = source_positions if self.encoder.adds_positions else None
        writes = target_positions if self.decoder.adds_positions else None
        told = {"mask": target_mask, "memory_mask": memory_mask, "positions": writes}
        return self.encode(source, mask=source_mask, positions=reads), told

    def encode(
        self,
        source: Int[Tensor, "B S"] | Float[Tensor, "B frames F"],
        *,
        mask: Mask | None = None,
        positions: Int[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B S M"]:
        """The memory: one vector a source token."""
        return self.encoder(source, mask=mask, positions=positions)

    def decode(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S M"],
        *,
        memory_mask: Mask | None = None,
        mask: Mask | None = None,
        positions: Int[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token after each of `target`; with a `cache`, `target` is only the new tokens."""
        return self.decoder(target, mask=mask, positions=positions, cache=cache, memory=memory, memory_mask=memory_mask)

    def extra_repr(self) -> str:
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"
