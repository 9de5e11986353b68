"""Audio encoders: one vector (`AudioEncoder`, as in Whisper) or symbol logits (`CTCEncoder`) per encoder frame.

`CTCEncoder` is for connectionist temporal classification (Graves et al., 2006). Its mask defines how much past and
future each encoder frame may attend to; the same model processes whole recordings or, chunk by chunk with a `KVCache`,
a stream.

    B recordings   T frames   F features   N encoder frames   M model dim   V symbols
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float, Int
from clearhead._core.validation import NonNegativeInt, PositiveFloat, PositiveInt
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Blocks, Causal, Mask, Window, causal, full, leaves, lookback, padding, window
from clearhead.models.stack import Stack, TransformerConfig, and_masks
from clearhead.nn import ConvStem, KVCache, StackedFrames
from clearhead.nn.mel import Mel
from clearhead.nn.positions import ALiBi, NoPE, Positions, RelativeBias, Sinusoidal

_FRAMES = "frames"  # key of the cached input frames


@dataclass(frozen=True, kw_only=True)
class AudioEncoderConfig(TransformerConfig):
    """Configuration of `AudioEncoder`, in addition to the fields of its blocks.

    Args:
        n_layers: Number of layers.
        n_features: Features per input frame.
        max_len: Number of encoder frames, of two input frames each.
        positions: Positions of the encoder frames.
        mask: Mask of the self-attention.
    """

    n_layers: PositiveInt
    n_features: PositiveInt = 80
    max_len: PositiveInt = 1500
    positions: Positions = Sinusoidal(layout="split")
    mask: Mask = full()

    def validate(self) -> None:
        super().validate()
        self.check_positions(self.positions)

    def build(self) -> AudioEncoder:
        return AudioEncoder(self)


class AudioEncoder(Stack):
    """A convolutional stem and a stack of self-attention blocks (the Whisper encoder).

    Args:
        config: The configuration.
    """

    @explain_keywords
    def __init__(self, config: AudioEncoderConfig) -> None:
        embedding = ConvStem(config.n_features, config.d_model)
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers)
        self.config = config
        config.init.apply(self, config.n_layers)

    def forward(
        self, frames: Float[Tensor, "B T F"], *, mask: Mask | None = None, positions: Int[Tensor, "..."] | None = None
    ) -> Float[Tensor, "B N M"]:
        """Return one vector per encoder frame; `mask` is over encoder frames, of two input frames each."""
        return self.run_blocks(
            self.add_positions(self.embedding(frames), positions), mask=and_masks(self.config.mask, mask)
        )


@dataclass(frozen=True)
class StreamingSpec:
    """How a model with a given mask runs on a stream.

    Attributes:
        chunk: Number of frames of the encoder that are processed together.
        left_context: Number of earlier frames that the cache must contain; None for all of them.
    """

    chunk: int
    left_context: int | None

    @classmethod
    def of(cls, mask: Mask) -> StreamingSpec:
        """Return the specification of a mask.

        Raises:
            ConfigError: The look-ahead of the mask is not bounded.
        """
        atoms = [atom.leaf for atom in leaves(mask)]
        unsupported = [leaf for leaf in atoms if not isinstance(leaf, (Causal, Window, Blocks))]
        chunk = math.lcm(*(leaf.size for leaf in atoms if isinstance(leaf, Blocks)))
        look_ahead = max((leaf.after for leaf in atoms if isinstance(leaf, Window)), default=0)
        # The mask is periodic with the chunk, so it is sufficient to test one chunk.
        if unsupported or mask.dense(2 * chunk + look_ahead + 1)[:chunk, chunk:].any():
            unbounded = f"its look-ahead is not bounded by the block size {chunk}"
            reason = f"{unsupported[0]} is not supported" if unsupported else unbounded
            raise ConfigError(
                f"the mask {mask} cannot be used on a stream: {reason}; train a model with causal(), causal() & "
                "window(64, 0) or (causal() | blocks(16)) & window(64, 15), or pass the whole recording"
            )
        span = lookback(mask)
        return cls(chunk, None if span is None else -(-(span - 1) // chunk) * chunk)


@dataclass(frozen=True, kw_only=True)
class CTCEncoderConfig(TransformerConfig):
    """Configuration of `CTCEncoder`.

    Features are normalized by fixed statistics, because those of a stream are not known. Positions are relative, so
    precision does not degrade in streams of several hours.

    Attributes:
        n_layers: Number of layers.
        n_symbols: Number of symbols, without the blank.
        mel: Mel spectrogram of the input.
        frame_stacking: Input frames per encoder frame.
        left_frames: Preceding input frames that each encoder frame includes as well.
        mask: Mask of self-attention over encoder frames.
        positions: Relative positions.
        mean: Mean of the features in training.
        std: Standard deviation of the features in training.
    """

    n_layers: PositiveInt
    n_symbols: PositiveInt = 10
    mel: Mel = Mel()
    renamed_fields: ClassVar[Mapping[str, str]] = {"n_stacked": "frame_stacking", "n_earlier": "left_frames"}
    frame_stacking: PositiveInt = 2
    left_frames: NonNegativeInt = 6
    mask: Mask = causal() & window(64, 0)
    positions: ALiBi | RelativeBias | NoPE = RelativeBias()
    mean: float = 0.0
    std: PositiveFloat = 1.0

    @property
    def blank(self) -> int:
        """Class index of the blank: the last class."""
        return self.n_symbols

    @property
    def frame_seconds(self) -> float:
        """Seconds per encoder frame."""
        return self.frame_stacking * self.mel.hop / self.mel.sample_rate

    def build(self) -> CTCEncoder:
        return CTCEncoder(self)


class CTCEncoder(Stack):
    """A stack of self-attention blocks over stacked audio frames, with a head of V + 1 classes.

    Args:
        config: The configuration.
    """

    @explain_keywords
    def __init__(self, config: CTCEncoderConfig) -> None:
        embedding = StackedFrames(
            config.mel.n_mels, config.frame_stacking, config.d_model, left_frames=config.left_frames
        )
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers)
        self.config = config
        self.head = nn.Linear(config.d_model, config.n_symbols + 1)
        config.init.apply(self, config.n_layers)

    @cached_property
    def streaming(self) -> StreamingSpec:
        """How to run this model on a stream; raises ConfigError if its mask does not support streaming."""
        return StreamingSpec.of(self.config.mask)

    def forward(
        self,
        frames: Float[Tensor, "B T F"],
        lengths: Int[Tensor, " B"] | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B N classes"]:
        """Return the logits of the symbols and of the blank (the last class) per encoder frame.

        Args:
            frames: Input frames; with a `cache`, the next chunk of a stream. The length of a chunk is a multiple of
                `frame_stacking` times the block size of the mask; only the last chunk may be shorter.
            lengths: Number of input frames of each recording, if they differ; not with a `cache`.
            mask: Combined with the configured mask.
            cache: State of the stream, which is updated; frames outside the mask's lookback are evicted.
        """
        if cache is not None:
            self._check_chunk(frames, lengths, cache)
        elif lengths is not None:
            mask = and_masks(padding(lengths // self.config.frame_stacking), mask)
        frames = (frames - self.config.mean) / self.config.std
        left_frames = frames.new_zeros(len(frames), self.config.left_frames, self.config.mel.n_mels)
        if cache is not None and cache[_FRAMES].is_cross:
            left_frames = cache[_FRAMES].get()[0][:, 0]
        x = self.run_blocks(
            self.add_positions(self.embedding(frames, left_frames)), mask=and_masks(self.config.mask, mask), cache=cache
        )
        if cache is not None:
            self._update_cache(frames, left_frames, cache)
        logits: Tensor = self.head(x)
        return logits

    def _update_cache(self, frames: Tensor, left_frames: Tensor, cache: KVCache) -> None:
        """Store the last input frames, which the next encoder frame includes, and evict old keys and values."""
        used = frames.shape[1] - frames.shape[1] % self.config.frame_stacking
        last = torch.cat((left_frames, frames[:, :used]), 1)[:, used:, None].transpose(1, 2).clone()  # (B, 1, left, F)
        cache[_FRAMES].set_cross(last, last)
        if self.streaming.left_context is not None:
            extra = cache.length - self.streaming.left_context
            cache.evict_oldest(max(0, extra - extra % self.streaming.chunk))

    def _check_chunk(self, frames: Tensor, lengths: Tensor | None, cache: KVCache) -> None:
        """Raise ShapeError for lengths with a cache, or if the previous chunk ended inside a block."""
        if lengths is not None:
            raise ShapeError("got lengths with a cache; all chunks of a stream have the same length: leave lengths out")
        if cache.length % self.streaming.chunk:
            raise ShapeError(
                f"the previous chunk of the stream ended inside a block of {self.streaming.chunk} encoder frames; "
                f"expected a multiple of {self.streaming.chunk * self.config.frame_stacking} frames in all chunks but "
                "the last"
            )
