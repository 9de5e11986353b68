"""The encoder-decoder: the encoder processes the source, the decoder generates the target with cross-attention to it.

B batch   S source tokens   T target tokens   M model dim   V vocabulary
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float, Int
from clearhead._core.typed_module import Module
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
    """Configuration of `EncoderDecoder`. Both stacks have the same sizes.

    With `share_embeddings`, source and target have one vocabulary and share the embedding matrix, as in the original
    Transformer (and with `tie_embeddings` the output matrix as well). The embedding is then one module with two names,
    so call `torch.func.functional_call` with `tie_weights=False`; otherwise torch swaps the parameter twice and does
    not restore it.

    Attributes:
        vocab_size: Size of the target vocabulary.
        n_encoder_layers: Number of encoder layers.
        n_decoder_layers: Number of decoder layers.
        source_vocab_size: Size of the source vocabulary; None for `vocab_size`.
        share_embeddings: Whether source and target share one embedding matrix.
        encoder_mask: Mask of the encoder's self-attention.
        decoder_mask: Mask of the decoder's self-attention.
        encoder_positions: Positions of the encoder; None for those of the decoder.
        encoder_max_len: Context length of the encoder; None for `max_len`.
        n_features: Number of features of an audio frame, if the source is audio (Whisper); None for text.
    """

    n_encoder_layers: PositiveInt
    n_decoder_layers: PositiveInt
    source_vocab_size: PositiveInt | None = None
    share_embeddings: bool = False
    encoder_mask: Mask = full()
    decoder_mask: Mask = causal()
    encoder_positions: Positions | None = None
    encoder_max_len: PositiveInt | None = None
    n_features: PositiveInt | None = None

    def validate(self) -> None:
        super().validate()
        require(
            self.n_features is None
            or not (self.share_embeddings or self.source_vocab_size is not None or self.layer_masks),
            f"EncoderDecoderConfig: n_features is {self.n_features}, so the source is audio without a vocabulary; "
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
        """Configuration of the encoder."""
        fields: dict[str, Any] = {
            "n_layers": self.n_encoder_layers,
            "mask": self.encoder_mask,
            "positions": self.encoder_positions or self.positions,
            "max_len": self.encoder_max_len or self.max_len,
        }
        if self.n_features is not None:
            return AudioEncoderConfig(**self._shared(TransformerConfig) | fields, n_features=self.n_features)
        fields["vocab_size"] = self.source_vocab_size or self.vocab_size
        return EncoderConfig(**self._shared(TextConfig) | fields)

    @property
    def decoder(self) -> DecoderConfig:
        """Configuration of the decoder."""
        shared = self._shared(LMConfig)
        if isinstance(self.positions, RelativeBias):
            # The decoder is causal, so all its buckets are used for preceding tokens.
            shared["positions"] = dataclasses.replace(self.positions, bidirectional=False)
        return DecoderConfig(**shared, n_layers=self.n_decoder_layers, mask=self.decoder_mask, cross_attention=True)

    def build(self) -> EncoderDecoder:
        return EncoderDecoder(self)


class EncoderDecoder(Module):
    """Sequence-to-sequence Transformer; the source is token ids or audio frames.

    Args:
        config: The configuration.
    """

    @explain_keywords
    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder: Encoder | AudioEncoder = config.encoder.build()
        self.decoder = Decoder(config.decoder)
        if config.share_embeddings and isinstance(self.encoder, Encoder):
            self.decoder.embedding = self.encoder.embedding

    @explain_keywords
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
        """Return the logits of the next token after each of `target`, given all of `source`.

        Args:
            source: Source token ids, or audio frames.
            target: Target token ids.
            source_mask: Mask of the encoder's self-attention, usually `padding(source_lengths)`.
            target_mask: Combined with the configured mask of the decoder's self-attention.
            memory_mask: Mask of cross-attention; by default `source_mask`.
            source_positions: Positions of the source tokens, for several packed pairs per row; ignored by models
                with relative positions.
            target_positions: The same for the target tokens.
        """
        memory, decoder_kwargs = self._encode_source(
            source, source_mask, target_mask, memory_mask, source_positions, target_positions
        )
        return self.decode(target, memory, **decoder_kwargs)

    def hidden_states(
        self, source: Int[Tensor, "B S"] | Float[Tensor, "B frames F"], target: Int[Tensor, "B T"], **kwargs: Any
    ) -> Float[Tensor, "B T M"]:
        """Return the hidden states from which `forward` computes its logits, for a chunked loss; same arguments."""
        memory, decoder_kwargs = self._encode_source(source, **kwargs)
        return self.decoder.hidden_states(target, memory=memory, **decoder_kwargs)

    def lm_head_weight(self) -> Float[Tensor, "V M"]:
        """Return the output matrix: `forward` is `hidden_states` times its transpose, post-processed."""
        return self.decoder.lm_head_weight()

    @property
    def logit_bias(self) -> nn.Parameter | None:
        """Bias of the logits, or None."""
        return self.decoder.logit_bias

    def _encode_source(
        self,
        source: Tensor,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        memory_mask: Mask | None = None,
        source_positions: Tensor | None = None,
        target_positions: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the encoder output and the other keyword arguments of the decoder."""
        if memory_mask is None:
            memory_mask = source_mask
            if source_mask is not None and as_mask(source_mask).depends_on_query:
                raise MaskError(
                    f"source_mask {source_mask} depends on the query's position and would be applied to source and "
                    "target queries; pass memory_mask as well, or set the config's encoder_mask"
                )
        encoder_positions = source_positions if self.encoder.adds_positions else None
        decoder_positions = target_positions if self.decoder.adds_positions else None
        decoder_kwargs = {"mask": target_mask, "memory_mask": memory_mask, "positions": decoder_positions}
        return self.encode(source, mask=source_mask, positions=encoder_positions), decoder_kwargs

    def encode(
        self,
        source: Int[Tensor, "B S"] | Float[Tensor, "B frames F"],
        *,
        mask: Mask | None = None,
        positions: Int[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B S M"]:
        """Return the encoder output: one vector per source token."""
        memory: Tensor = self.encoder(source, mask=mask, positions=positions)
        return memory

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
        """Return the logits of the next token after each of `target` (with a `cache`, the new tokens only)."""
        logits: Tensor = self.decoder(
            target, mask=mask, positions=positions, cache=cache, memory=memory, memory_mask=memory_mask
        )
        return logits

    def extra_repr(self) -> str:
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"
