"""The encoder of wav2vec 2.0 (Baevski et al., 2020): a Transformer over frames of a waveform, for CTC.

B recordings   S samples   N encoder frames   M model dim   V symbols
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float, Int
from clearhead._core.validation import NonNegativeInt, PositiveInt, require
from clearhead.errors import ShapeError
from clearhead.masks import Mask, full, padding
from clearhead.models.stack import Stack, TransformerConfig, and_masks
from clearhead.nn import GELU, Activation
from clearhead.nn.positions import NoPE
from clearhead.nn.waveform import ConvPositions, WaveformStem


@dataclass(frozen=True, kw_only=True)
class WaveformEncoderConfig(TransformerConfig):
    """Configuration of `WaveformEncoder`, in addition to the fields of its blocks.

    Attributes:
        n_layers: Number of layers.
        conv_widths: Channels of each convolution of the stem.
        conv_kernels: Kernel size of each convolution.
        conv_strides: Stride of each convolution.
        conv_bias: Whether the convolutions of the stem have biases.
        conv_norm: "group" normalizes the channels of the first convolution over time; "layer" normalizes the output of
            each convolution over its channels.
        conv_activation: Activation of the convolutions, those of the positions too.
        position_kernel: Kernel size of the convolution that computes positions.
        position_groups: Number of groups of this convolution.
        n_symbols: Number of symbols of the head, the blank included; 0 for no head.
        blank: Id of the blank of CTC.
        mask: Mask of the self-attention over encoder frames.
    """

    n_layers: PositiveInt
    conv_widths: tuple[PositiveInt, ...] = (512,) * 7
    conv_kernels: tuple[PositiveInt, ...] = (10, 3, 3, 3, 3, 2, 2)
    conv_strides: tuple[PositiveInt, ...] = (5, 2, 2, 2, 2, 2, 2)
    conv_bias: bool = False
    conv_norm: Literal["group", "layer"] = "group"
    conv_activation: Activation = GELU()
    position_kernel: PositiveInt = 128
    position_groups: PositiveInt = 16
    n_symbols: NonNegativeInt = 0
    blank: NonNegativeInt = 0
    mask: Mask = full()

    def validate(self) -> None:
        super().validate()
        sizes = (self.conv_widths, self.conv_kernels, self.conv_strides)
        require(
            len(set(map(len, sizes))) == 1 and bool(self.conv_widths),
            f"{self.owner}: conv_widths, conv_kernels and conv_strides have {', '.join(str(len(x)) for x in sizes)} "
            "values; expected one of each per convolution",
        )
        require(
            self.d_model % self.position_groups == 0,
            f"{self.owner}: position_groups is {self.position_groups}; expected a divisor of d_model {self.d_model}",
        )
        require(
            not self.conv_activation.gated,
            f"{self.owner}: conv_activation is {self.conv_activation}; expected an activation without a gate",
        )
        require(
            not self.n_symbols or self.blank < self.n_symbols,
            f"{self.owner}: blank is {self.blank}; expected one of the {self.n_symbols} symbols",
        )

    def build(self) -> WaveformEncoder:
        return WaveformEncoder(self)


class WaveformEncoder(Stack):
    """A convolutional stem over samples, positions from a convolution, self-attention blocks, and a head for CTC.

    Args:
        config: The configuration.
    """

    embedding: WaveformStem

    @explain_keywords
    def __init__(self, config: WaveformEncoderConfig) -> None:
        stem = WaveformStem(
            config.conv_widths,
            config.conv_kernels,
            config.conv_strides,
            config.d_model,
            bias=config.conv_bias,
            conv_norm=config.conv_norm,
            activation=config.conv_activation,
            norm=config.norm,
        )
        super().__init__(config, stem, NoPE(), n_layers=config.n_layers)
        self.config = config
        self.conv_positions = ConvPositions(
            config.d_model, config.position_kernel, config.position_groups, config.conv_activation
        )
        self.head = nn.Linear(config.d_model, config.n_symbols) if config.n_symbols else None
        config.init.apply(self, config.n_layers)

    def forward(
        self,
        samples: Float[Tensor, "B S"],
        lengths: Int[Tensor, " B"] | None = None,
        *,
        mask: Mask | None = None,
    ) -> Float[Tensor, "B N width"]:
        """Return the logits of the symbols per encoder frame; without a head, one vector per encoder frame.

        Args:
            samples: Waveforms of recordings; shorter ones end in zeros.
            lengths: Number of samples of each recording, if they differ.
            mask: Combined with the configured mask; over encoder frames.
        """
        x = self.embedding(samples)
        if lengths is not None:
            n_frames = self._check_lengths(lengths, samples)
            is_frame = torch.arange(x.shape[1], device=x.device) < n_frames[:, None]
            x, mask = x * is_frame[..., None], and_masks(padding(n_frames), mask)
        x = self.run_blocks(self.add_positions(self.conv_positions(x)), mask=and_masks(self.config.mask, mask))
        return x if self.head is None else self.head(x)

    def _check_lengths(self, lengths: Tensor, samples: Tensor) -> Tensor:
        """Return the number of encoder frames of each recording; raise ShapeError for lengths that do not fit."""
        if lengths.shape != samples.shape[:1]:
            raise ShapeError(f"lengths have shape {tuple(lengths.shape)}; expected one for each of {len(samples)} rows")
        return self.embedding.n_frames(lengths)
