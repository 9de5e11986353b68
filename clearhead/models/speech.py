"""Encoders that hear: frames of sound in, one vector (`AudioEncoder`) or one score a symbol (`CTCEncoder`) for each
moment out.

The first is the hearing half of an encoder-decoder (Whisper). The second is for connectionist temporal classification
(Graves et al., 2006). Its mask says how much of the past and of the future each moment sees, and that is all that tells
a model for whole recordings from one for a stream: what is trained in parallel under the mask runs piece by piece with
a `KVCache`.

    B recordings   T frames   F features   N moments (2 or `frame_stacking` frames each)   M model width   V symbols
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.validation import NonNegativeInt, PositiveFloat, PositiveInt
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Blocks, Causal, Mask, Window, causal, full, leaves, lookback, padding, window
from clearhead.models.stack import Stack, TransformerConfig, and_masks
from clearhead.nn import ConvStem, KVCache, StackedFrames
from clearhead.nn.mel import Mel
from clearhead.nn.positions import ALiBi, NoPE, Positions, RelativeBias, Sinusoidal

_FRAMES = "frames"  # the part of a cache that keeps the last of them


@dataclass(frozen=True, kw_only=True)
class AudioEncoderConfig(TransformerConfig):
    """`AudioEncoder`'s configuration; `max_len` is the number of moments, two frames each, that it is meant for."""

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
    """A stack of self-attention blocks behind a front of convolutions."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        embedding = ConvStem(config.n_features, config.d_model)
        super().__init__(config, embedding, config.positions, n_layers=config.n_layers)
        self.config = config
        config.init.apply(self, config.n_layers)

    def forward(
        self, frames: Float[Tensor, "B T F"], *, mask: Mask | None = None, positions: Int[Tensor, "..."] | None = None
    ) -> Float[Tensor, "B N M"]:
        """One vector a moment. `mask` speaks of moments, of which there are half as many as frames."""
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
        kinds = [atom.leaf for atom in leaves(mask)]
        strange = [leaf for leaf in kinds if not isinstance(leaf, (Causal, Window, Blocks))]
        step = math.lcm(*(leaf.size for leaf in kinds if isinstance(leaf, Blocks)))
        ahead = max((leaf.after for leaf in kinds if isinstance(leaf, Window)), default=0)
        # The expression repeats itself with every block, so one block that sees nothing after its end speaks for all.
        if strange or mask.dense(2 * step + ahead + 1)[:step, step:].any():
            endless = f"what it sees ahead of a moment has no end at a block of {step}"
            why = f"{strange[0]} in it" if strange else endless
            raise ConfigError(
                f"the mask {mask} cannot be run on a stream, because of {why}; train a model under causal(), "
                "causal() & window(64, 0) or (causal() | blocks(16)) & window(64, 15), or give it the whole recording"
            )
        far = lookback(mask)
        return cls(step, None if far is None else -(-(far - 1) // step) * step)


@dataclass(frozen=True, kw_only=True)
class CTCEncoderConfig(TransformerConfig):
    """`CTCEncoder`'s configuration. Features are normalised by two fixed numbers: a stream has no statistics yet.

    Positions are distances: those go on for hours without losing digits."""

    n_layers: PositiveInt
    n_symbols: PositiveInt = 10
    mel: Mel = Mel()
    renamed_fields: ClassVar[Mapping[str, str]] = {"n_stacked": "frame_stacking", "n_earlier": "left_frames"}
    frame_stacking: PositiveInt = 2  # frames to a moment
    left_frames: NonNegativeInt = 6  # frames before them that it is made of, too
    mask: Mask = causal() & window(64, 0)
    positions: ALiBi | RelativeBias | NoPE = RelativeBias()
    mean: float = 0.0  # of the features, in training
    std: PositiveFloat = 1.0

    @property
    def blank(self) -> int:
        """The class that stands for no symbol: the last."""
        return self.n_symbols

    @property
    def frame_seconds(self) -> float:
        """Seconds from one moment to the next."""
        return self.frame_stacking * self.mel.hop / self.mel.sample_rate

    def build(self) -> CTCEncoder:
        return CTCEncoder(self)


class CTCEncoder(Stack):
    """A stack of self-attention blocks over the frames of a sound, with a head of V + 1 classes."""

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
        """How this model runs on a stream; a `ConfigError` where its mask cannot."""
        return StreamingSpec.of(self.config.mask)

    def forward(
        self,
        frames: Float[Tensor, "B T F"],
        lengths: Int[Tensor, " B"] | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B N classes"]:
        """Logits of the symbols and, last, of the blank, for every moment.

        `lengths` counts the frames of each recording, where they differ; `mask` forbids more. With a cache, frames are
        the next chunk of a stream: a multiple of `frame_stacking` of them and, if the mask has blocks, of whole blocks;
        only the last chunk may be shorter. Frames that the mask no longer attends to are evicted from the cache."""
        if cache is not None:
            self._check_piece(frames, lengths, cache)
        elif lengths is not None:
            mask = and_masks(padding(lengths // self.config.frame_stacking), mask)
        frames = (frames - self.config.mean) / self.config.std
        before = frames.new_zeros(len(frames), self.config.left_frames, self.config.mel.n_mels)
        if cache is not None and cache[_FRAMES].is_cross:
            before = cache[_FRAMES].get()[0][:, 0]
        x = self.run_blocks(
            self.add_positions(self.embedding(frames, before)), mask=and_masks(self.config.mask, mask), cache=cache
        )
        if cache is not None:
            self._keep(frames, before, cache)
        return self.head(x)

    def _keep(self, frames: Tensor, before: Tensor, cache: KVCache) -> None:
        """The last frames, which the next moments are made of, too, and of the moments those that they can see."""
        used = frames.shape[1] - frames.shape[1] % self.config.frame_stacking
        last = torch.cat((before, frames[:, :used]), 1)[:, used:, None].transpose(1, 2).clone()  # (B, 1, earlier, F)
        cache[_FRAMES].set_cross(last, last)
        if self.streaming.left_context is not None:
            extra = cache.length - self.streaming.left_context
            cache.evict_oldest(max(0, extra - extra % self.streaming.chunk))

    def _check_piece(self, frames: Tensor, lengths: Tensor | None, cache: KVCache) -> None:
        if lengths is not None:
            raise ShapeError("got lengths with a cache; the pieces of a stream are all of one length: leave them out")
        if cache.length % self.streaming.chunk:
            raise ShapeError(
                f"the previous chunk of the stream ended inside a block of {self.streaming.chunk} encoder frames; "
                f"expected a multiple of {self.streaming.chunk * self.config.frame_stacking} frames in all chunks but "
                "the last"
            )
